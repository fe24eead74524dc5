//! AArch64: every CPU has NEON; those of ARMv8.4 (Apple since the A13) and many of ARMv8.2 (since Cortex-A75 and A55,
//! 2017) have its dot product, too.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives

use super::attend::{self, AttentionQueries, AttentionTile};
use super::int8::{COLUMN_TILE, QuantisedRows};
use super::math::Lanes;
use super::packed;
use super::panel_block::Panels;
use super::plain;
use super::simd::{Quants, Simd};
use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

/// See `scalar::matmul_int8`. The sums of a column take two registers, so tiles are of two groups.
#[target_feature(enable = "neon")]
pub fn matmul_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Neon<Widening>, 4, 4, 2>(w, x, out) }
}

/// The same with dot products: tiles of three groups have their sums and products in 24 of the 32 registers.
#[target_feature(enable = "neon,dotprod")]
pub fn matmul_int8_dot(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Neon<Dot>, 4, 4, 3>(w, x, out) }
}

/// See `scalar::matmul_f32`.
#[target_feature(enable = "neon")]
pub fn matmul_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { plain::matmul_f32::<Neon<Widening>, 4>(w, x, out) }
}

/// See `attend::attend`.
#[target_feature(enable = "neon")]
pub fn attend(tile: &AttentionTile, queries: &mut AttentionQueries) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { attend::attend_simd::<Neon<Widening>, 4>(tile, queries) }
}

/// How the products of four columns are summed for four rows.
trait Products {
    type Sum: Copy;

    /// A sum that begins with a number for each row.
    unsafe fn start(rows: int32x4_t) -> Self::Sum;
    /// A sum plus the products with the four activations FOUR of `x`.
    unsafe fn add<const FOUR: i32>(kind: Quants, sum: Self::Sum, w: int8x16_t, x: int8x16_t) -> Self::Sum;
    /// The sum of each row.
    unsafe fn total(kind: Quants, sum: Self::Sum) -> int32x4_t;
}

/// By SDOT: four products for each row join its sum of 32 bits. Quants of less than 64 are positive as signed bytes, too.
struct Dot;

impl Products for Dot {
    type Sum = int32x4_t;

    #[inline(always)]
    unsafe fn start(rows: int32x4_t) -> int32x4_t {
        rows
    }

    #[inline(always)]
    unsafe fn add<const FOUR: i32>(_kind: Quants, mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{four}]",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x, four = const FOUR,
            options(pure, nomem, nostack, preserves_flags)
        );
        sum
    }

    #[inline(always)]
    unsafe fn total(_kind: Quants, sum: int32x4_t) -> int32x4_t {
        sum
    }
}

/// By SMULL and SMLAL: each product has its lane of 16 bits, four for a row, and there are never more than eight in it:
/// 8 * 31 * 127 = 31,496, and of `Above32`, which has two sums, 4 * 63 * 127 = 32,004.
struct Widening;

#[derive(Clone, Copy)]
struct WideningSum {
    /// Rows 0 and 1; of `Signed` quants sums of 32 bits, two for a row.
    low: int16x8_t,
    /// Rows 2 and 3.
    high: int16x8_t,
    /// What each row began with.
    start: int32x4_t,
}

impl Products for Widening {
    type Sum = WideningSum;

    #[inline(always)]
    unsafe fn start(rows: int32x4_t) -> WideningSum {
        WideningSum { low: vdupq_n_s16(0), high: vdupq_n_s16(0), start: rows }
    }

    #[inline(always)]
    unsafe fn add<const FOUR: i32>(kind: Quants, sum: WideningSum, w: int8x16_t, x: int8x16_t) -> WideningSum {
        let x = vreinterpretq_s8_s32(vdupq_laneq_s32::<FOUR>(vreinterpretq_s32_s8(x)));
        let WideningSum { mut low, mut high, start } = sum;
        if kind == Quants::Signed {
            let (wide_low, wide_high) = (vreinterpretq_s32_s16(low), vreinterpretq_s32_s16(high));
            low = vreinterpretq_s16_s32(vpadalq_s16(wide_low, vmull_s8(vget_low_s8(w), vget_low_s8(x))));
            high = vreinterpretq_s16_s32(vpadalq_s16(wide_high, vmull_high_s8(w, x)));
        } else {
            // As intrinsics, the compiler would widen the weights apart from the products.
            asm!(
                "smlal {low:v}.8h, {w:v}.8b, {x:v}.8b",
                "smlal2 {high:v}.8h, {w:v}.16b, {x:v}.16b",
                low = inout(vreg) low, high = inout(vreg) high, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        WideningSum { low, high, start }
    }

    #[inline(always)]
    unsafe fn total(kind: Quants, sum: WideningSum) -> int32x4_t {
        let (low, high) = if kind == Quants::Signed {
            (vreinterpretq_s32_s16(sum.low), vreinterpretq_s32_s16(sum.high))
        } else {
            (vpaddlq_s16(sum.low), vpaddlq_s16(sum.high))
        };
        vaddq_s32(vpaddq_s32(low, high), sum.start)
    }
}

struct Neon<P>(PhantomData<P>);

/// Bytes `row` to `row + 3` of a panel's sixteen, each widened to its row's lane.
#[inline(always)]
unsafe fn widened(panel: *const u8, row: usize) -> uint32x4_t {
    const ZERO: u8 = 128; // beyond the table, also with a row added
    const PLACES: [u8; 16] = [0, ZERO, ZERO, ZERO, 1, ZERO, ZERO, ZERO, 2, ZERO, ZERO, ZERO, 3, ZERO, ZERO, ZERO];
    let places = vaddq_u8(vld1q_u8(PLACES.as_ptr()), vdupq_n_u8(row as u8));
    vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(panel), places))
}

impl<P: Products> Simd for Neon<P> {
    const ROWS: usize = 4;
    const REGISTERS: usize = 32;
    type Bytes = uint8x16_t;
    type Scale = int32x4_t;
    type Floats = float32x4_t;
    type Sixteen = int8x16_t;
    type Sum = P::Sum;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> uint8x16_t {
        vld1q_u8(at)
    }

    #[inline(always)]
    unsafe fn and(a: uint8x16_t, mask: u8) -> uint8x16_t {
        vandq_u8(a, vdupq_n_u8(mask))
    }

    #[inline(always)]
    unsafe fn insert(mut a: uint8x16_t, from: uint8x16_t, mask: u8) -> uint8x16_t {
        // From the intrinsic the compiler, which knows of the zeros, would make two instructions.
        asm!(
            "bit {a:v}.16b, {from:v}.16b, {mask:v}.16b",
            a = inout(vreg) a, from = in(vreg) from, mask = in(vreg) vdupq_n_u8(mask),
            options(pure, nomem, nostack, preserves_flags)
        );
        a
    }

    /// Within bytes, so that nothing crosses over.
    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(a: uint8x16_t) -> uint8x16_t {
        match BITS {
            1 => vshrq_n_u8::<1>(a),
            2 => vshrq_n_u8::<2>(a),
            3 => vshrq_n_u8::<3>(a),
            4 => vshrq_n_u8::<4>(a),
            _ => unreachable!("formats shift by 1 to 4 bits"),
        }
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(a: uint8x16_t) -> uint8x16_t {
        vshlq_u8(a, vdupq_n_s8(BITS as i8))
    }

    #[inline(always)]
    unsafe fn unit_scale() -> int32x4_t {
        vdupq_n_s32(1)
    }

    #[inline(always)]
    unsafe fn unsigned_scale(panel: *const u8, row: usize) -> int32x4_t {
        vreinterpretq_s32_u32(widened(panel, row))
    }

    #[inline(always)]
    unsafe fn signed_scale(at: *const u8) -> int32x4_t {
        let bytes = vreinterpret_s8_u32(vdup_n_u32(at.cast::<u32>().read_unaligned()));
        vmovl_s16(vget_low_s16(vmovl_s8(bytes)))
    }

    /// Two where scales are for 16 columns.
    #[inline(always)]
    fn n_sums(kind: Quants) -> usize {
        if kind == Quants::Above32 { 2 } else { 1 }
    }

    #[inline(always)]
    unsafe fn prepare(_kind: Quants, w: uint8x16_t) -> uint8x16_t {
        w
    }

    #[inline(always)]
    unsafe fn sixteen(x: *const i8) -> int8x16_t {
        vld1q_s8(x)
    }

    #[inline(always)]
    unsafe fn start(kind: Quants, pairs: *const [i16; 2], step: usize, n: usize) -> P::Sum {
        let mut sum = vdupq_n_s16(0);
        for i in 0..n {
            if kind.offset() != 0 {
                let pair = vdupq_n_s32(pairs.add(i * step).cast::<i32>().read_unaligned());
                sum = vaddq_s16(sum, vreinterpretq_s16_s32(pair));
            }
        }
        P::start(vmulq_n_s32(vpaddlq_s16(sum), -i32::from(kind.offset())))
    }

    #[inline(always)]
    unsafe fn add_products(kind: Quants, sum: P::Sum, w: uint8x16_t, x: int8x16_t, four: usize) -> P::Sum {
        let w = vreinterpretq_s8_u8(w);
        match four {
            0 => P::add::<0>(kind, sum, w, x),
            1 => P::add::<1>(kind, sum, w, x),
            2 => P::add::<2>(kind, sum, w, x),
            3 => P::add::<3>(kind, sum, w, x),
            _ => unreachable!("sixteen are four fours"),
        }
    }

    /// A loop over the fours would not be unrolled, as they are part of the instructions.
    #[inline(always)]
    unsafe fn add_tile<const R: usize>(
        kind: Quants,
        sums: &mut [[P::Sum; R]; COLUMN_TILE],
        w: &[uint8x16_t; R],
        x: int8x16_t,
    ) {
        for r in 0..R {
            sums[0][r] = Self::add_products(kind, sums[0][r], w[r], x, 0);
            sums[1][r] = Self::add_products(kind, sums[1][r], w[r], x, 1);
            sums[2][r] = Self::add_products(kind, sums[2][r], w[r], x, 2);
            sums[3][r] = Self::add_products(kind, sums[3][r], w[r], x, 3);
        }
    }

    #[inline(always)]
    unsafe fn finish(kind: Quants, sums: [P::Sum; 2], scales: [int32x4_t; 2]) -> float32x4_t {
        let mut scaled = vmulq_s32(P::total(kind, sums[0]), scales[0]);
        if Self::n_sums(kind) == 2 {
            scaled = vmlaq_s32(scaled, P::total(kind, sums[1]), scales[1]);
        }
        vcvtq_f32_s32(scaled)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        vdupq_n_f32(value)
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> float32x4_t {
        vld1q_f32(at.cast())
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> float32x4_t {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(at.cast())))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> float32x4_t {
        let halves = vld1_u16(at.cast());
        let floats: float32x4_t;
        asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats, halves = in(vreg) halves,
            options(pure, nomem, nostack)
        );
        floats
    }

    #[inline(always)]
    unsafe fn from_unsigned(panel: *const u8, row: usize) -> float32x4_t {
        vcvtq_f32_u32(widened(panel, row))
    }

    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn negated_mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmsq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn store(a: float32x4_t, to: *mut f32) {
        vst1q_f32(to, a);
    }
}
