//! Products of weights that are stored as floating point numbers, for any vector unit, straight from the panel.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over lanes, groups and columns read best by index

use super::int8::GROUP;
use super::math::{LANES, Lanes};
use super::panel_block::Panels;
use super::prefetch::{self, prefetch_lines};
use super::scalar;
use super::simd::Simd;
use crate::quant::DType;

/// How weights that are stored as floating point numbers become f32.
///
/// # Safety
/// As for `Simd`.
pub trait Plain {
    /// Bytes of a weight.
    const BYTES: usize;
    /// A weight of each row.
    unsafe fn load<S: Simd>(at: *const u8) -> S::Floats;
}

macro_rules! plain {
    ($name:ident, $bytes:literal, $from:ident) => {
        pub struct $name;

        impl Plain for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<S: Simd>(at: *const u8) -> S::Floats {
                S::$from(at)
            }
        }
    };
}
plain!(F32, 4, from_f32);
plain!(F16, 2, from_f16);
plain!(BF16, 2, from_bf16);

/// See `scalar::matmul_f32`, which this is for quantised weights.
///
/// # Safety
/// As for `matmul_int8`.
#[inline(always)]
pub unsafe fn matmul_f32<S: Simd, const GROUPS: usize>(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    match w.dtype {
        DType::F32 => multiply::<S, F32, GROUPS>(w, x, out),
        DType::F16 => multiply::<S, F16, GROUPS>(w, x, out),
        DType::BF16 => multiply::<S, BF16, GROUPS>(w, x, out),
        _ => scalar::matmul_f32(w, x, out),
    }
}

#[inline(always)]
unsafe fn multiply<S: Simd, P: Plain, const GROUPS: usize>(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    const { assert!(GROUPS * S::ROWS == LANES) };
    let n = x.len() / w.cols;
    assert!(out.len() == n * w.n_panels());
    for i in 0..w.n_panels() {
        multiply_panel::<S, P, GROUPS>(&w.one(i), x, &mut out[i * n..][..n]);
    }
}

#[inline(always)]
unsafe fn multiply_panel<S: Simd, P: Plain, const GROUPS: usize>(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    let mut first = 0;
    macro_rules! in_turns_of {
        ($($n:literal)*) => {$(
            while let Some(out) = out[first..].first_chunk_mut::<$n>() {
                for group in 0..GROUPS {
                    multiply_columns::<S, P, 1, $n>(w, group * S::ROWS, x.as_ptr().add(first * w.cols), out);
                }
                first += $n;
            }
        )*};
    }
    in_turns_of!(4 2);
    if let Some(out) = out[first..].first_chunk_mut::<1>() {
        multiply_columns::<S, P, GROUPS, 1>(w, 0, x.as_ptr().add(first * w.cols), out);
    }
}

/// `out[c]` = G groups of a panel, from row `row` on, times the columns at `x`.
#[inline(always)]
unsafe fn multiply_columns<S: Simd, P: Plain, const G: usize, const N: usize>(
    w: &Panels,
    row: usize,
    x: *const f32,
    out: &mut [Lanes; N],
) {
    let (distance, asks_ahead) = (prefetch::distance(), prefetch::is_on());
    let mut acc = [[S::splat(0.0); G]; N];
    for start in (0..w.cols).step_by(GROUP) {
        let end = w.cols.min(start + GROUP);
        let (mut even, mut odd) = ([[S::splat(0.0); G]; N], [[S::splat(0.0); G]; N]);
        let mut k = start;
        while k < end {
            let at = w.bytes.as_ptr().add((k * LANES + row) * P::BYTES);
            if row == 0 && asks_ahead {
                prefetch_lines(at.wrapping_add(distance), 2 * LANES * P::BYTES);
            }
            add_weights::<S, P, G, N>(at, x.add(k), w.cols, &mut even);
            if k + 1 < end {
                add_weights::<S, P, G, N>(at.add(LANES * P::BYTES), x.add(k + 1), w.cols, &mut odd);
            }
            k += 2;
        }
        for c in 0..N {
            for g in 0..G {
                acc[c][g] = S::add(acc[c][g], S::add(even[c][g], odd[c][g]));
            }
        }
    }
    for c in 0..N {
        for g in 0..G {
            S::store(acc[c][g], out[c][row + g * S::ROWS..].as_mut_ptr());
        }
    }
}

/// `sums[c][g]` += one weight of each row in G groups, at `w`, times element 0 of column c at `x`.
#[inline(always)]
unsafe fn add_weights<S: Simd, P: Plain, const G: usize, const N: usize>(
    w: *const u8,
    x: *const f32,
    cols: usize,
    sums: &mut [[S::Floats; G]; N],
) {
    for g in 0..G {
        let weights = P::load::<S>(w.add(g * S::ROWS * P::BYTES));
        for c in 0..N {
            sums[c][g] = S::mul_add(S::splat(*x.add(c * cols)), weights, sums[c][g]);
        }
    }
}
