//! Three weight formats in panels of 8 * O rows, and the kernels that multiply a panel by quantised activations.
//!
//! A panel interleaves its rows so that 32 bytes hold 4 consecutive columns of 8 rows. Every 32-bit lane keeps to one
//! row: products of bytes are added in pairs of 16 bits as long as they fit, multiplied by the integer scale of the
//! weight block into 32 bits, and added to the row's f32 sum when a scale applies that is not an integer.
//!
//! Each format has two kernels: one column of x from the panel as stored, and four columns from a panel whose quants
//! and scales were unpacked first. Both add in the same order, so they give the same bits.

#![allow(clippy::needless_range_loop)] // loops over octets and columns read best by index

use crate::activations::{Form, GROUP, Scaling, XGroup};
use crate::panels::Bytes;
use crate::simd::*;
use std::array::from_fn;
use std::ops::Range;

/// Columns of x that a tile multiplies at once.
pub const TILE_COLUMNS: usize = 4;

/// 4 consecutive columns of 8 rows.
type Quads = [[u8; 4]; 8];

/// The f32 sums of a panel's rows, for N columns of x.
pub type Totals<const O: usize, const N: usize> = [[Floats; N]; O];

/// A weight format.
pub trait Weights: 'static {
    /// As in GGUF.
    const NAME: &'static str;
    /// Bytes of 256 weights of a row.
    const ROW_BYTES: usize;
    /// Where among them f16 numbers are.
    const F16_AT: &'static [usize];
    /// Where among them integer scales are.
    const SCALES_AT: Range<usize>;
    /// 256 columns of a panel as stored: the bytes of the source in another order.
    type Packed<const O: usize>: Bytes + Clone + Send + Sync;
    /// The same unpacked.
    type Tile<const O: usize>: Clone;

    /// The panel of the rows [octet][row], ROW_BYTES each.
    fn pack<const O: usize>(rows: &[[&[u8]; 8]; O]) -> Self::Packed<O>;
    /// 256 weights of a row in plain scalar arithmetic, written from the format's definition.
    fn decode(row: &[u8]) -> [f64; GROUP];
    /// totals += w * x. Calls `ahead(b)` for b in 0..8, evenly spread, to prefetch.
    fn multiply_packed<F: Form, const O: usize>(
        w: &Self::Packed<O>,
        x: &XGroup<1>,
        totals: &mut Totals<O, 1>,
        ahead: impl Fn(usize),
    );
    /// Column k of the panel in floats, for elements of x that are kept apart.
    fn column<const O: usize>(w: &Self::Packed<O>, k: usize) -> [Floats; O];
    /// For `multiply_tile`.
    fn unpack<const O: usize>(w: &Self::Packed<O>) -> Self::Tile<O>;
    /// totals += w * x, to the same bits.
    fn multiply_tile<F: Form, const O: usize>(
        w: &Self::Tile<O>,
        x: &XGroup<TILE_COLUMNS>,
        totals: &mut Totals<O, TILE_COLUMNS>,
    );
}

/// sums += products of 4 columns in 16 bits; see `multiply_bytes`.
#[inline(always)]
fn accumulate<const O: usize, const N: usize>(sums: &mut [[Ints; N]; O], weights: [Ints; O], x: &[[i8; 4]; N]) {
    for c in 0..N {
        let x = broadcast_i8(x[c]);
        for o in 0..O {
            sums[o][c] = add_i16(sums[o][c], multiply_bytes(weights[o], x));
            pin(&mut sums[o][c]);
        }
    }
}

/// The sums within a group of a K-quant.
struct Sums<const O: usize, const N: usize> {
    /// With all integer scales in it, until it could overflow or a scale applies.
    ints: [[Ints; N]; O],
    floats: [[Floats; N]; O],
}

impl<const O: usize, const N: usize> Sums<O, N> {
    #[inline(always)]
    fn new() -> Self {
        Self { ints: [[zero(); N]; O], floats: [[zero_f32(); N]; O] }
    }

    /// Adds 16-bit sums of columns up to `end`, times the scales of their weight block.
    #[inline(always)]
    fn add<F: Form>(&mut self, sums: &[[Ints; N]; O], scales: &[Ints; O], x: &XGroup<N>, end: usize) {
        let block = (end - 1) / F::WIDTH;
        for c in 0..N {
            for o in 0..O {
                let scale = match F::SCALING {
                    Scaling::TwoLevel => multiply_i16(scales[o], broadcast_i16(x.multipliers[block][c])),
                    _ => scales[o],
                };
                let ints = add_i32(self.ints[o][c], multiply_pairs(sums[o][c], scale));
                if F::SCALING == Scaling::Block && end.is_multiple_of(F::WIDTH) {
                    let scale = broadcast_f32(x.scales[block][c]);
                    self.floats[o][c] = multiply_add(floats(ints), scale, self.floats[o][c]);
                    self.ints[o][c] = zero();
                } else {
                    self.ints[o][c] = ints;
                }
            }
        }
    }

    /// Moves the integers to the floats, in forms that do not do so block by block.
    #[inline(always)]
    fn flush(&mut self) {
        for c in 0..N {
            for o in 0..O {
                self.floats[o][c] = add(self.floats[o][c], floats(self.ints[o][c]));
                self.ints[o][c] = zero();
            }
        }
    }

    /// totals += the floats times the weights' f16 scales, once everything is flushed.
    #[inline(always)]
    fn finish<F: Form>(&self, d: [Floats; O], x: &XGroup<N>, totals: &mut Totals<O, N>) {
        for c in 0..N {
            for o in 0..O {
                let sum = match F::SCALING {
                    Scaling::Block => self.floats[o][c],
                    _ => multiply(self.floats[o][c], broadcast_f32(x.unit[c])),
                };
                totals[o][c] = multiply_add(sum, d[o], totals[o][c]);
            }
        }
    }
}

// Q4_K: weight = d * scale * q - dmin * min, q from 0 to 15, a 6-bit scale and min for each 32.
// 16 bits hold a block's pair sums: 8 * 2 * 15 * 127 = 30,480. 32 bits hold a group: 2 * 30,480 * 63 * 63 * 8 < 2^31.

/// See `Weights`.
pub enum Q4K {}

/// See `Weights::Packed`.
#[derive(Clone)]
#[repr(C)]
pub struct PackedQ4K<const O: usize> {
    d: [[[u8; 2]; 8]; O],
    dmin: [[[u8; 2]; 8]; O],
    scales: [[[u8; 8]; O]; 12],
    quants: [[Quads; O]; 32],
}

// SAFETY: byte arrays only.
unsafe impl<const O: usize> Bytes for PackedQ4K<O> {}

/// See `Weights::Tile`.
#[derive(Clone)]
#[repr(align(32))]
pub struct TileQ4K<const O: usize> {
    quants: [[Quads; O]; 64],
    scales: [[[i16; 16]; O]; 8],
    mins: [[[f32; 8]; O]; 8],
    d: [[f32; 8]; O],
    dmin: [[f32; 8]; O],
}

/// The scales and the mins, [block][octet][row].
#[inline(always)]
fn six_bits<const O: usize>(packed: &[[[u8; 8]; O]; 12]) -> [[[[u8; 8]; O]; 8]; 2] {
    let mut unpacked = [[[[0; 8]; O]; 8]; 2];
    let bytes = packed.as_flattened().as_chunks::<4>().0;
    for part in 0..O {
        let [low_scales, low_mins, both] = [0, 1, 2].map(|i| load(&bytes[i * O + part]));
        let values = [
            [and(low_scales, 63), or(and(both, 15), and(shift_right(low_scales, 2), 0x30))],
            [and(low_mins, 63), or(and(shift_right(both, 4), 15), and(shift_right(low_mins, 2), 0x30))],
        ];
        for (unpacked, values) in unpacked.iter_mut().zip(values) {
            for (half, value) in values.into_iter().enumerate() {
                store(&mut unpacked.as_flattened_mut().as_chunks_mut::<4>().0[half * O + part], value);
            }
        }
    }
    unpacked
}

/// totals -= dmin * the sum over blocks of min * sum of x; `min(b, o)` gives block b's.
#[inline(always)]
fn subtract_mins<const O: usize, const N: usize>(
    dmin: [Floats; O],
    min: impl Fn(usize, usize) -> Floats,
    x: &XGroup<N>,
    totals: &mut Totals<O, N>,
) {
    let mut sums = [[zero_f32(); N]; O];
    for b in 0..8 {
        let mins = from_fn::<_, O, _>(|o| min(b, o));
        for c in 0..N {
            let x = broadcast_f32(x.sums[b][c]);
            for o in 0..O {
                sums[o][c] = multiply_add(mins[o], x, sums[o][c]);
            }
        }
    }
    for c in 0..N {
        for o in 0..O {
            totals[o][c] = subtract_product(sums[o][c], dmin[o], totals[o][c]);
        }
    }
}

impl Weights for Q4K {
    const NAME: &'static str = "Q4_K";
    const ROW_BYTES: usize = 144;
    const F16_AT: &'static [usize] = &[0, 2];
    const SCALES_AT: Range<usize> = 4..16;
    type Packed<const O: usize> = PackedQ4K<O>;
    type Tile<const O: usize> = TileQ4K<O>;

    fn pack<const O: usize>(rows: &[[&[u8]; 8]; O]) -> PackedQ4K<O> {
        PackedQ4K {
            d: rows.map(|rows| rows.map(|row| [row[0], row[1]])),
            dmin: rows.map(|rows| rows.map(|row| [row[2], row[3]])),
            scales: from_fn(|i| rows.map(|rows| rows.map(|row| row[4 + i]))),
            quants: from_fn(|g| rows.map(|rows| rows.map(|row| from_fn(|j| row[16 + 4 * g + j])))),
        }
    }

    fn decode(row: &[u8]) -> [f64; GROUP] {
        let (d, dmin, packed) = (f16(row, 0), f16(row, 2), &row[4..16]);
        from_fn(|k| {
            let block = k / 32;
            let (scale, min) = match block {
                0..4 => (packed[block] & 63, packed[4 + block] & 63),
                _ => (
                    packed[4 + block] & 15 | packed[block - 4] >> 6 << 4,
                    packed[4 + block] >> 4 | packed[block] >> 6 << 4,
                ),
            };
            let quant = row[16 + 32 * (k / 64) + k % 32] >> (4 * (block % 2)) & 15;
            d * f64::from(scale) * f64::from(quant) - dmin * f64::from(min)
        })
    }

    #[inline(always)]
    fn multiply_packed<F: Form, const O: usize>(
        w: &PackedQ4K<O>,
        x: &XGroup<1>,
        totals: &mut Totals<O, 1>,
        ahead: impl Fn(usize),
    ) {
        let [scales, mins] = six_bits(&w.scales);
        let mut sums = Sums::new();
        for chunk in 0..4 {
            let (quads, x_quads) = (&w.quants.as_chunks::<8>().0[chunk], &x.quants.as_chunks::<16>().0[chunk]);
            let sum_span = |span: usize| {
                let mut low_and_high = [[[zero(); 1]; O]; 2];
                for i in F::SPAN / 4 * span..F::SPAN / 4 * (span + 1) {
                    let bytes = from_fn::<_, O, _>(|o| load(&quads[i][o]));
                    accumulate(&mut low_and_high[0], bytes.map(|b| and(b, 15)), &x_quads[i]);
                    accumulate(&mut low_and_high[1], bytes.map(|b| and(shift_right(b, 4), 15)), &x_quads[8 + i]);
                }
                low_and_high
            };
            let of_spans = [sum_span(0), if F::SPAN < 32 { sum_span(1) } else { [[[zero(); 1]; O]; 2] }];
            for half in 0..2 {
                let block = 2 * chunk + half;
                let scales = from_fn(|o| pairs_u8(&scales[block][o]));
                for span in 0..32 / F::SPAN {
                    sums.add::<F>(&of_spans[span][half], &scales, x, 32 * block + F::SPAN * (span + 1));
                }
                ahead(block);
            }
        }
        if F::SCALING != Scaling::Block {
            sums.flush();
        }
        sums.finish::<F>(from_fn(|o| floats_f16(&w.d[o])), x, totals);
        subtract_mins(from_fn(|o| floats_f16(&w.dmin[o])), |b, o| floats_u8(&mins[b][o]), x, totals);
    }

    #[inline(always)]
    fn column<const O: usize>(w: &PackedQ4K<O>, k: usize) -> [Floats; O] {
        let block = k / 32;
        from_fn(|o| {
            let eight = |i: usize| u64::from_le_bytes(w.scales[i][o]);
            let [low_6, low_4, high_2] = [0x3f, 0x0f, 0x30].map(|byte| byte * 0x0101_0101_0101_0101);
            let (scales, mins) = match block {
                0..4 => (eight(block) & low_6, eight(4 + block) & low_6),
                _ => (
                    eight(4 + block) & low_4 | eight(block - 4) >> 2 & high_2,
                    eight(4 + block) >> 4 & low_4 | eight(block) >> 2 & high_2,
                ),
            };
            let quants = bits(load(&w.quants[8 * (k / 64) + k % 32 / 4][o]), 8 * (k % 4) + 4 * (block % 2), 15);
            let scaled = multiply(multiply(floats_f16(&w.d[o]), floats_u8(&scales.to_le_bytes())), floats(quants));
            subtract_product(floats_f16(&w.dmin[o]), floats_u8(&mins.to_le_bytes()), scaled)
        })
    }

    fn unpack<const O: usize>(w: &PackedQ4K<O>) -> TileQ4K<O> {
        let mut tile = TileQ4K {
            quants: [[[[0; 4]; 8]; O]; 64],
            scales: [[[0; 16]; O]; 8],
            mins: [[[0.0; 8]; O]; 8],
            d: [[0.0; 8]; O],
            dmin: [[0.0; 8]; O],
        };
        let [scales, mins] = six_bits(&w.scales);
        for o in 0..O {
            for i in 0..32 {
                let bytes = load(&w.quants[i][o]);
                let quad = 16 * (i / 8) + i % 8;
                store(&mut tile.quants[quad][o], and(bytes, 15));
                store(&mut tile.quants[quad + 8][o], and(shift_right(bytes, 4), 15));
            }
            for b in 0..8 {
                store(&mut tile.scales[b][o], pairs_u8(&scales[b][o]));
                store_f32(&mut tile.mins[b][o], floats_u8(&mins[b][o]));
            }
            store_f32(&mut tile.d[o], floats_f16(&w.d[o]));
            store_f32(&mut tile.dmin[o], floats_f16(&w.dmin[o]));
        }
        tile
    }

    #[inline(always)]
    fn multiply_tile<F: Form, const O: usize>(
        w: &TileQ4K<O>,
        x: &XGroup<TILE_COLUMNS>,
        totals: &mut Totals<O, TILE_COLUMNS>,
    ) {
        let mut sums = Sums::new();
        for block in 0..8 {
            let scales = from_fn(|o| load(&w.scales[block][o]));
            for span in 0..32 / F::SPAN {
                let mut of_span = [[zero(); TILE_COLUMNS]; O];
                for i in 0..F::SPAN / 4 {
                    let quad = 8 * block + F::SPAN / 4 * span + i;
                    accumulate(&mut of_span, from_fn(|o| load(&w.quants[quad][o])), &x.quants[quad]);
                }
                sums.add::<F>(&of_span, &scales, x, 32 * block + F::SPAN * (span + 1));
            }
        }
        if F::SCALING != Scaling::Block {
            sums.flush();
        }
        sums.finish::<F>(from_fn(|o| load_f32(&w.d[o])), x, totals);
        subtract_mins(from_fn(|o| load_f32(&w.dmin[o])), |b, o| load_f32(&w.mins[b][o]), x, totals);
    }
}

// Q6_K: weight = d * scale * (q - 32), q from 0 to 63, an 8-bit scale for each 16.
// 16-bit sums start at -32 * the sum of x. What they pass on the way wraps around, but at the end of 16 columns they
// hold sums of (q - 32) * x, and those fit: 4 * 2 * 32 * 127 = 32,512. A single product of two pairs fits as well:
// 2 * 63 * 127 = 16,002. 32 bits hold a group, 2 * 32,512 * 128 * 16 < 2^31, but with a multiplier only 64 columns:
// 2 * 32,512 * 128 * 63 * 4 < 2^31.

/// See `Weights`.
pub enum Q6K {}

/// See `Weights::Packed`.
#[derive(Clone)]
#[repr(C)]
pub struct PackedQ6K<const O: usize> {
    d: [[[u8; 2]; 8]; O],
    scales: [[[u8; 8]; O]; 16],
    /// [quad of `ql`'s first and second 32 bytes and of `qh`, by 128 columns]
    quants: [[[Quads; O]; 3]; 16],
}

// SAFETY: byte arrays only.
unsafe impl<const O: usize> Bytes for PackedQ6K<O> {}

/// See `Weights::Tile`.
#[derive(Clone)]
#[repr(align(32))]
pub struct TileQ6K<const O: usize> {
    quants: [[Quads; O]; 64],
    scales: [[[i16; 16]; O]; 16],
    d: [[f32; 8]; O],
}

/// Columns that a two-level form may add in 32 bits.
const CAPACITY_Q6K: usize = 64;

/// Quad `i` of four blocks of 32, those of the 128 columns `half`, which share bytes.
#[inline(always)]
fn quads_q6k<const O: usize>(w: &PackedQ6K<O>, octet: usize, half: usize, i: usize) -> [Ints; 4] {
    let [low, low_2, high] = [0, 1, 2].map(|plane| load(&w.quants[8 * half + i][plane][octet]));
    [
        or(and(low, 15), and(shift_left(high, 4), 0x30)),
        or(and(low_2, 15), and(shift_left(high, 2), 0x30)),
        or(and(shift_right(low, 4), 15), and(high, 0x30)),
        or(and(shift_right(low_2, 4), 15), and(shift_right(high, 2), 0x30)),
    ]
}

/// What 16-bit sums of Q6_K start with: [octet][column].
#[inline(always)]
fn offsets<const O: usize, const N: usize>(x: &XGroup<N>, block: usize) -> [[Ints; N]; O] {
    [x.offsets[block].map(broadcast_i16); O]
}

impl Weights for Q6K {
    const NAME: &'static str = "Q6_K";
    const ROW_BYTES: usize = 210;
    const F16_AT: &'static [usize] = &[208];
    const SCALES_AT: Range<usize> = 192..208;
    type Packed<const O: usize> = PackedQ6K<O>;
    type Tile<const O: usize> = TileQ6K<O>;

    fn pack<const O: usize>(rows: &[[&[u8]; 8]; O]) -> PackedQ6K<O> {
        PackedQ6K {
            d: rows.map(|rows| rows.map(|row| [row[208], row[209]])),
            scales: from_fn(|i| rows.map(|rows| rows.map(|row| row[192 + i]))),
            quants: from_fn(|g| {
                let (half, quad) = (g / 8, g % 8);
                let starts = [64 * half, 64 * half + 32, 128 + 32 * half];
                starts.map(|start| rows.map(|rows| rows.map(|row| from_fn(|j| row[start + 4 * quad + j]))))
            }),
        }
    }

    fn decode(row: &[u8]) -> [f64; GROUP] {
        let d = f16(row, 208);
        from_fn(|k| {
            let (half, quarter, j) = (k / 128, k / 32 % 4, k % 32);
            let low = row[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter / 2)) & 15;
            let high = row[128 + 32 * half + j] >> (2 * quarter) & 3;
            let scale = row[192 + k / 16].cast_signed();
            d * f64::from(scale) * (f64::from(low | high << 4) - 32.0)
        })
    }

    #[inline(always)]
    fn multiply_packed<F: Form, const O: usize>(
        w: &PackedQ6K<O>,
        x: &XGroup<1>,
        totals: &mut Totals<O, 1>,
        ahead: impl Fn(usize),
    ) {
        let mut sums = Sums::<O, 1>::new();
        for half in 0..2 {
            let x_quads = &x.quants.as_chunks::<32>().0[half];
            let sum_blocks = |t: usize| {
                let mut of_blocks: [[[Ints; 1]; O]; 4] = from_fn(|q| offsets(x, 8 * half + 2 * q + t));
                for i in 4 * t..4 * (t + 1) {
                    for o in 0..O {
                        let weights = quads_q6k(w, o, half, i);
                        for q in 0..4 {
                            accumulate(std::array::from_mut(&mut of_blocks[q][o]), [weights[q]], &x_quads[8 * q + i]);
                        }
                    }
                }
                of_blocks
            };
            let of_blocks = [sum_blocks(0), sum_blocks(1)];
            for q in 0..4 {
                for t in 0..2 {
                    let block = 8 * half + 2 * q + t;
                    let scales = from_fn(|o| pairs_i8(&w.scales[block][o]));
                    sums.add::<F>(&of_blocks[t][q], &scales, x, 16 * (block + 1));
                }
                let end = 128 * half + 32 * (q + 1);
                if F::SCALING == Scaling::TwoLevel && end.is_multiple_of(CAPACITY_Q6K) {
                    sums.flush();
                }
                ahead(4 * half + q);
            }
        }
        if F::SCALING == Scaling::Group {
            sums.flush();
        }
        sums.finish::<F>(from_fn(|o| floats_f16(&w.d[o])), x, totals);
    }

    #[inline(always)]
    fn column<const O: usize>(w: &PackedQ6K<O>, k: usize) -> [Floats; O] {
        let (q, byte) = (k / 32 % 4, 8 * (k % 4));
        let quads = &w.quants[8 * (k / 128) + k % 32 / 4];
        from_fn(|o| {
            let low = bits(load(&quads[q % 2][o]), byte + 4 * (q / 2), 15);
            let high = bits(load(&quads[2][o]), byte + 2 * q, 3);
            let scales = multiply(floats_f16(&w.d[o]), floats_i8(&w.scales[k / 16][o]));
            multiply(scales, floats(centred_6_bits(high, low)))
        })
    }

    fn unpack<const O: usize>(w: &PackedQ6K<O>) -> TileQ6K<O> {
        let mut tile = TileQ6K { quants: [[[[0; 4]; 8]; O]; 64], scales: [[[0; 16]; O]; 16], d: [[0.0; 8]; O] };
        for half in 0..2 {
            for i in 0..8 {
                for o in 0..O {
                    for (q, weights) in quads_q6k(w, o, half, i).into_iter().enumerate() {
                        store(&mut tile.quants[32 * half + 8 * q + i][o], weights);
                    }
                }
            }
        }
        for o in 0..O {
            for b in 0..16 {
                store(&mut tile.scales[b][o], pairs_i8(&w.scales[b][o]));
            }
            store_f32(&mut tile.d[o], floats_f16(&w.d[o]));
        }
        tile
    }

    #[inline(always)]
    fn multiply_tile<F: Form, const O: usize>(
        w: &TileQ6K<O>,
        x: &XGroup<TILE_COLUMNS>,
        totals: &mut Totals<O, TILE_COLUMNS>,
    ) {
        let mut sums = Sums::new();
        for piece in 0..GROUP / CAPACITY_Q6K {
            for t in 0..CAPACITY_Q6K / 16 {
                let block = 4 * piece + t;
                let mut of_block = offsets(x, block);
                for quad in 4 * block..4 * block + 4 {
                    accumulate(&mut of_block, from_fn(|o| load(&w.quants[quad][o])), &x.quants[quad]);
                }
                let scales = from_fn(|o| load(&w.scales[block][o]));
                sums.add::<F>(&of_block, &scales, x, 16 * (block + 1));
            }
            if F::SCALING == Scaling::TwoLevel {
                sums.flush();
            }
        }
        if F::SCALING == Scaling::Group {
            sums.flush();
        }
        sums.finish::<F>(from_fn(|o| load_f32(&w.d[o])), x, totals);
    }
}

// Q8_0: weight = d * q, q from -128 to 127, an f16 d for each 32.
// The product of bytes takes |q| and x with the sign of q: 2 * 128 * 127 = 32,512 fit in 16 bits, once. A multiplier
// costs nothing here: it takes the place of the 1 by which pairs are multiplied to be added in 32 bits.

/// See `Weights`.
pub enum Q8_0 {}

/// See `Weights::Packed`.
#[derive(Clone)]
#[repr(C)]
pub struct PackedQ8_0<const O: usize> {
    d: [[[[u8; 2]; 8]; O]; 8],
    quants: [[Quads; O]; 64],
}

// SAFETY: byte arrays only.
unsafe impl<const O: usize> Bytes for PackedQ8_0<O> {}

/// See `Weights::Tile`.
#[derive(Clone)]
#[repr(align(32))]
pub struct TileQ8_0<const O: usize> {
    d: [[[f32; 8]; O]; 8],
    quants: [[Quads; O]; 64],
}

/// Both kernels: the quants need no unpacking.
#[inline(always)]
fn multiply_q8_0<F: Form, const O: usize, const N: usize>(
    quants: &[[Quads; O]; 64],
    d: impl Fn(usize, usize) -> Floats,
    x: &XGroup<N>,
    totals: &mut Totals<O, N>,
    ahead: impl Fn(usize),
) {
    let mut of_group = [[zero_f32(); N]; O];
    for block in 0..8 {
        let (quads, x_quads) = (&quants.as_chunks::<8>().0[block], &x.quants.as_chunks::<8>().0[block]);
        let d = from_fn::<_, O, _>(|o| d(block, o));
        let (mut ints, mut of_block) = ([[zero(); N]; O], [[zero_f32(); N]; O]);
        for span in 0..32 / F::SPAN {
            let block_of_x = (32 * block + F::SPAN * span) / F::WIDTH;
            let multipliers: [_; N] = match F::SCALING {
                Scaling::TwoLevel => x.multipliers[block_of_x].map(broadcast_i16),
                _ => [broadcast_i16([1, 1]); N],
            };
            for i in F::SPAN / 4 * span..F::SPAN / 4 * (span + 1) {
                let weights = from_fn::<_, O, _>(|o| load(&quads[i][o]));
                let sizes = weights.map(abs_i8);
                for c in 0..N {
                    let values = broadcast_i8(x_quads[i][c]);
                    for o in 0..O {
                        let pairs = multiply_bytes(sizes[o], sign_i8(values, weights[o]));
                        ints[o][c] = add_i32(ints[o][c], multiply_pairs(pairs, multipliers[c]));
                        pin(&mut ints[o][c]);
                    }
                }
            }
            if F::SCALING == Scaling::Block {
                for c in 0..N {
                    let scale = broadcast_f32(x.scales[block_of_x][c]);
                    for o in 0..O {
                        of_block[o][c] = multiply_add(floats(ints[o][c]), scale, of_block[o][c]);
                        ints[o][c] = zero();
                    }
                }
            }
        }
        for c in 0..N {
            for o in 0..O {
                if F::SCALING == Scaling::Block {
                    totals[o][c] = multiply_add(of_block[o][c], d[o], totals[o][c]);
                } else {
                    of_group[o][c] = multiply_add(floats(ints[o][c]), d[o], of_group[o][c]);
                }
            }
        }
        ahead(block);
    }
    if F::SCALING != Scaling::Block {
        for c in 0..N {
            for o in 0..O {
                totals[o][c] = multiply_add(of_group[o][c], broadcast_f32(x.unit[c]), totals[o][c]);
            }
        }
    }
}

impl Weights for Q8_0 {
    const NAME: &'static str = "Q8_0";
    const ROW_BYTES: usize = 8 * 34;
    const F16_AT: &'static [usize] = &[0, 34, 68, 102, 136, 170, 204, 238];
    const SCALES_AT: Range<usize> = 0..0;
    type Packed<const O: usize> = PackedQ8_0<O>;
    type Tile<const O: usize> = TileQ8_0<O>;

    fn pack<const O: usize>(rows: &[[&[u8]; 8]; O]) -> PackedQ8_0<O> {
        PackedQ8_0 {
            d: from_fn(|b| rows.map(|rows| rows.map(|row| [row[34 * b], row[34 * b + 1]]))),
            quants: from_fn(|g| rows.map(|rows| rows.map(|row| from_fn(|j| row[34 * (g / 8) + 2 + 4 * (g % 8) + j])))),
        }
    }

    fn decode(row: &[u8]) -> [f64; GROUP] {
        from_fn(|k| f16(row, 34 * (k / 32)) * f64::from(row[34 * (k / 32) + 2 + k % 32].cast_signed()))
    }

    #[inline(always)]
    fn multiply_packed<F: Form, const O: usize>(
        w: &PackedQ8_0<O>,
        x: &XGroup<1>,
        totals: &mut Totals<O, 1>,
        ahead: impl Fn(usize),
    ) {
        multiply_q8_0::<F, O, 1>(&w.quants, |b, o| floats_f16(&w.d[b][o]), x, totals, ahead);
    }

    #[inline(always)]
    fn column<const O: usize>(w: &PackedQ8_0<O>, k: usize) -> [Floats; O] {
        from_fn(|o| {
            let quants = signed_byte(load(&w.quants[k / 4][o]), 8 * (k % 4));
            multiply(floats_f16(&w.d[k / 32][o]), floats(quants))
        })
    }

    fn unpack<const O: usize>(w: &PackedQ8_0<O>) -> TileQ8_0<O> {
        let mut tile = TileQ8_0 { d: [[[0.0; 8]; O]; 8], quants: w.quants };
        for b in 0..8 {
            for o in 0..O {
                store_f32(&mut tile.d[b][o], floats_f16(&w.d[b][o]));
            }
        }
        tile
    }

    #[inline(always)]
    fn multiply_tile<F: Form, const O: usize>(
        w: &TileQ8_0<O>,
        x: &XGroup<TILE_COLUMNS>,
        totals: &mut Totals<O, TILE_COLUMNS>,
    ) {
        multiply_q8_0::<F, O, TILE_COLUMNS>(&w.quants, |b, o| load_f32(&w.d[b][o]), x, totals, |_| ());
    }
}

/// The little-endian f16 at a place of a row, which must be normal or 0.
fn f16(row: &[u8], at: usize) -> f64 {
    let bits = u16::from_le_bytes([row[at], row[at + 1]]);
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    match i32::from(bits >> 10 & 31) {
        0 => 0.0,
        exponent => sign * (1.0 + f64::from(bits & 1023) / 1024.0) * f64::from(exponent - 15).exp2(),
    }
}
