//! Every table against the scalar one, bit for bit, and against f64.

use super::*;
use crate::pack::pack_panel;
use crate::quant::{DType, blocks};
use half::f16;

/// A small random number generator (xorshift64*), so that every run sees the same cases.
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in -1..1.
    fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.uniform()).collect()
    }

    /// Where the half-precision fields of a block are.
    fn halves(dtype: DType) -> &'static [usize] {
        match dtype {
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
            DType::Q6_K => &[208],
            _ => &[0],
        }
    }

    /// Random blocks whose scales are finite: half-precision fields get a small exponent.
    fn weights(&mut self, dtype: DType, n_blocks: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..n_blocks * dtype.block_bytes()).map(|_| self.bits() as u8).collect();
        let halves = Self::halves(dtype);
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            match dtype {
                DType::F32 => block.copy_from_slice(&self.uniform().to_le_bytes()),
                DType::BF16 => block.copy_from_slice(&self.uniform().to_le_bytes()[2..]),
                _ => halves.iter().for_each(|at| block[at + 1] = block[at + 1] & 0x83 | 0x28),
            }
        }
        bytes
    }
}

/// Quantised columns that own their data, filled with nonsense before.
#[derive(PartialEq, Debug)]
struct Quantised {
    stride: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    pair_sums: Vec<[i16; 2]>,
    apart: Vec<[Apart; N_APART]>,
    tile_quants: Vec<[[i8; 4]; COLUMN_TILE]>,
    tile_scales: Vec<[f32; COLUMN_TILE]>,
    tile_sums: Vec<[f32; COLUMN_TILE]>,
    tile_pair_sums: Vec<[[i16; 2]; COLUMN_TILE]>,
}

/// Tiles of columns of `len`.
fn tiles<T: Copy + Default>(columns: &[T], len: usize) -> Vec<[T; COLUMN_TILE]> {
    let columns: Vec<_> = columns.chunks(len).collect();
    let mut all = Vec::new();
    for columns in columns.chunks(COLUMN_TILE) {
        let mut tile = vec![[T::default(); COLUMN_TILE]; len];
        interleave(columns, &mut tile);
        all.extend(tile);
    }
    all
}

impl Quantised {
    fn new(kernels: &Kernels, x: &[f32], cols: usize) -> Self {
        let (n, stride) = (x.len() / cols, cols.next_multiple_of(GROUP));
        let mut all = Self {
            stride,
            quants: vec![99; n * stride],
            scales: vec![f32::NAN; n * stride / QUANT_BLOCK],
            sums: vec![f32::NAN; n * stride / QUANT_BLOCK],
            pair_sums: vec![[99; 2]; n * stride / SUM_BLOCK],
            apart: vec![[Apart { index: 99, value: f32::NAN }; N_APART]; n],
            tile_quants: Vec::new(),
            tile_scales: Vec::new(),
            tile_sums: Vec::new(),
            tile_pair_sums: Vec::new(),
        };
        for c in 0..n {
            let part = |len: usize| c * (stride / len)..(c + 1) * (stride / len);
            let mut row = QuantisedRow {
                quants: &mut all.quants[part(1)],
                scales: &mut all.scales[part(QUANT_BLOCK)],
                sums: &mut all.sums[part(QUANT_BLOCK)],
                pair_sums: &mut all.pair_sums[part(SUM_BLOCK)],
                apart: &mut all.apart[c],
            };
            (kernels.quantise)(&x[c * cols..(c + 1) * cols], &mut row);
        }
        all.tile_quants = tiles(all.quants.as_chunks().0, stride / 4);
        all.tile_scales = tiles(&all.scales, stride / QUANT_BLOCK);
        all.tile_sums = tiles(&all.sums, stride / QUANT_BLOCK);
        all.tile_pair_sums = tiles(&all.pair_sums, stride / SUM_BLOCK);
        all
    }

    /// With or without tiles.
    fn rows(&self, with_tiles: bool) -> QuantisedRows<'_> {
        let tiles = QuantisedTiles {
            stride: self.stride,
            quants: &self.tile_quants,
            scales: &self.tile_scales,
            sums: &self.tile_sums,
            pair_sums: &self.tile_pair_sums,
        };
        QuantisedRows {
            stride: self.stride,
            quants: &self.quants,
            scales: &self.scales,
            sums: &self.sums,
            pair_sums: &self.pair_sums,
            apart: &self.apart,
            tiles: with_tiles.then_some(tiles),
        }
    }

    /// Column c as the numbers that it stands for.
    fn column(&self, c: usize, cols: usize) -> Vec<f32> {
        let quants = &self.quants[c * self.stride..][..cols];
        let scales = &self.scales[c * self.stride / QUANT_BLOCK..];
        let mut column: Vec<f32> =
            quants.iter().enumerate().map(|(k, q)| f32::from(*q) * scales[k / QUANT_BLOCK]).collect();
        self.apart[c].iter().for_each(|apart| column[apart.index as usize] += apart.value);
        column
    }
}

fn max_abs(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max, x| x.abs().max(max))
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The product in f64, and the sum of the magnitudes of its terms.
fn exact_dot(w: &[f32], x: &[f32]) -> (f64, f64) {
    w.iter().zip(x).fold((0.0, 0.0), |(sum, size), (w, x)| {
        let term = f64::from(*w) * f64::from(*x);
        (sum + term, size + term.abs())
    })
}

/// Cases of a format: columns around the ends of blocks and groups.
fn widths(dtype: DType) -> Vec<usize> {
    let whole_blocks = [1, 2, 3, 7, 8, 9, 11, 20].map(|n| n * dtype.block_len());
    let odd = if dtype.is_quantised() { vec![] } else { vec![15, 17, 255, 257, 600] };
    whole_blocks.into_iter().chain(odd).collect()
}

#[test]
fn products_have_the_scalar_bits_and_are_close_to_f64() {
    let mut rng = Rng(7);
    for dtype in DType::all() {
        for cols in widths(dtype) {
            for n_rows in [1, 3, LANES - 1, LANES, 2 * LANES + 5] {
                let bytes = rng.weights(dtype, n_rows * cols / dtype.block_len());
                let row_bytes = bytes.len() / n_rows;
                let mut panels = vec![0xee; n_rows.div_ceil(LANES) * LANES * row_bytes];
                let rows = bytes.chunks(LANES * row_bytes).zip(panels.chunks_exact_mut(LANES * row_bytes));
                rows.for_each(|(rows, panel)| pack_panel(dtype, row_bytes, rows, panel));
                let w = Panels { dtype, cols, bytes: &panels };
                let mut decoded = vec![0.0; n_rows * cols];
                blocks::decode(dtype, &bytes, &mut decoded);
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33] {
                    check_products(&w, &decoded, &rng.vector(n * cols), n);
                }
            }
        }
    }
}

fn check_products(w: &Panels, decoded: &[f32], x: &[f32], n: usize) {
    let cols = w.cols;
    let blank = vec![[f32::NAN; LANES]; w.n_panels() * n];
    let (mut want_f32, mut want_int8) = (blank.clone(), blank.clone());
    let quantised = Quantised::new(&SCALAR, x, cols);
    (SCALAR.matmul_f32)(w, x, &mut want_f32);
    if w.dtype.is_quantised() {
        (SCALAR.matmul_int8)(w, &quantised.rows(false), &mut want_int8);
    }
    let n_rows = decoded.len() / cols;
    for c in 0..n {
        let int8 = quantised.column(c, cols);
        let at = |r: usize| (r / LANES * n + c, r % LANES);
        let mut past = (n_rows..w.n_panels() * LANES).map(at);
        assert!(past.all(|(i, lane)| want_f32[i][lane] == 0.0), "rows past the last are zeros");
        for (r, row) in decoded.chunks_exact(cols).enumerate() {
            let near = |got: f32, (sum, size): (f64, f64)| {
                assert!((f64::from(got) - sum).abs() <= 1e-5 * size, "{:?} {cols} {n}: {got} {sum}", w.dtype);
            };
            near(want_f32[at(r).0][at(r).1], exact_dot(row, &x[c * cols..(c + 1) * cols]));
            if w.dtype.is_quantised() {
                // Scale times quant and minimum are summed apart here, so their sizes count, not their difference.
                let (sum, size) = exact_dot(row, &int8);
                near(
                    want_int8[at(r).0][at(r).1],
                    (sum, size + 16.0 * int8.iter().map(|x| f64::from(x.abs())).sum::<f64>()),
                );
            }
        }
    }
    for table in &available()[1..] {
        let mut got = blank.clone();
        (table.matmul_f32)(w, x, &mut got);
        assert!(same_bits(got.as_flattened(), want_f32.as_flattened()), "{} {:?}", table.isa, w.dtype);
        if w.dtype.is_quantised() {
            assert_eq!(Quantised::new(table, x, cols), quantised, "{}", table.isa);
            for with_tiles in [false, true] {
                let mut got = blank.clone();
                (table.matmul_int8)(w, &quantised.rows(with_tiles), &mut got);
                let same = same_bits(got.as_flattened(), want_int8.as_flattened());
                assert!(same, "{} {:?} {cols} {n} {with_tiles}", table.isa, w.dtype);
            }
        }
    }
}

/// Inputs that ask most of the sums' widths: the largest activations of alternating and of equal signs, vectors with
/// elements of 1e5, of subnormals, of nothing; and the weights whose every bit is set, or none.
#[test]
fn extremes_stay_finite_and_have_the_scalar_bits() {
    const COLS: usize = 512;
    let mut rng = Rng(11);
    let inputs: [&mut dyn FnMut(usize) -> f32; 7] = [
        &mut |_| 1.0,
        &mut |k| if k % 2 == 0 { 1.0 } else { -1.0 },
        &mut |_| -1e5,
        &mut |_| rng.uniform() * 1e5,
        &mut |k| if k % 97 == 0 { 1e5 } else { 1e-3 },
        &mut |k| k as f32 * 1e-41,
        &mut |_| 0.0,
    ];
    let inputs = inputs.map(|f| (0..COLS).map(f).collect::<Vec<f32>>());
    for dtype in DType::all().filter(|dtype| dtype.is_quantised()) {
        for fill in [0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0] {
            let row_bytes = COLS / dtype.block_len() * dtype.block_bytes();
            let mut bytes = rng.weights(dtype, LANES * COLS / dtype.block_len());
            let halves = Rng::halves(dtype);
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                for (i, byte) in block.iter_mut().enumerate() {
                    if !halves.iter().any(|at| (*at..at + 2).contains(&i)) {
                        *byte = fill;
                    }
                }
            }
            let mut panel = vec![0; LANES * row_bytes];
            pack_panel(dtype, row_bytes, &bytes, &mut panel);
            let w = Panels { dtype, cols: COLS, bytes: &panel };
            let mut decoded = vec![0.0; LANES * COLS];
            blocks::decode(dtype, &bytes, &mut decoded);
            for x in &inputs {
                check_products(&w, &decoded, x, 1);
            }
        }
    }
}

#[test]
fn quantising_keeps_within_half_a_step_and_survives_extremes() {
    let mut rng = Rng(3);
    for table in available() {
        for size in [1.0, 1e-38, 1e-30, 1e5, 1e30] {
            let x: Vec<f32> = rng.vector(300).iter().map(|v| v * size).collect();
            let quantised = Quantised::new(table, &x, 300);
            let mut rest = x.clone();
            for apart in quantised.apart[0] {
                assert_eq!(apart.value, x[apart.index as usize]);
                assert_eq!(quantised.quants[apart.index as usize], 0);
                rest[apart.index as usize] = 0.0;
            }
            let smallest_apart = quantised.apart[0].iter().fold(f32::MAX, |min, apart| min.min(apart.value.abs()));
            assert!(max_abs(&rest) <= smallest_apart, "{} {size}", table.isa);
            for (b, (got, x)) in quantised.column(0, 300).chunks(QUANT_BLOCK).zip(x.chunks(QUANT_BLOCK)).enumerate() {
                let max = max_abs(&rest[b * QUANT_BLOCK..][..x.len()]);
                let half_step = if max < 1e-35 { max } else { max / 127.0 * 0.5001 };
                assert!(got.iter().zip(x).all(|(g, x)| (g - x).abs() <= half_step), "{} {size}", table.isa);
            }
            assert!(quantised.quants.iter().all(|q| *q != i8::MIN));
            assert!(quantised.quants[300..].iter().all(|q| *q == 0));
            assert!(quantised.scales.iter().chain(&quantised.sums).all(|v| v.is_finite()));
        }
        for x in [&[0.0; 40][..], &[5.0], &[-3.0, 7.0]] {
            let quantised = Quantised::new(table, x, x.len());
            assert!(quantised.quants.iter().all(|q| *q == 0) && quantised.scales.iter().all(|s| *s == 0.0));
            assert_eq!(quantised.column(0, x.len()), x);
        }
    }
}

#[test]
fn sums_of_quants_are_kept_for_each_block() {
    let x = Rng(4).vector(600);
    let quantised = Quantised::new(&SCALAR, &x, 600);
    for (pairs, quants) in quantised.pair_sums.iter().zip(quantised.quants.chunks(SUM_BLOCK)) {
        let sum = |lane: usize| quants.chunks(2).skip(lane).step_by(2).flatten().map(|q| i16::from(*q)).sum::<i16>();
        assert_eq!(*pairs, [sum(0), sum(1)]);
    }
    for (b, quants) in quantised.quants.chunks(QUANT_BLOCK).enumerate() {
        let total: i32 = quants.iter().map(|q| i32::from(*q)).sum();
        assert_eq!(quantised.sums[b], quantised.scales[b] * total as f32);
    }
}

#[test]
fn vector_operations_have_the_scalar_bits_and_are_close_to_f64() {
    let mut rng = Rng(5);
    for len in [1, 2, 15, 16, 17, 64, 255, 640] {
        let (x, y) = (rng.vector(len), rng.vector(len));
        let square: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / len as f64;
        let norm = |i: usize| f64::from(x[i]) / (square + 1e-6).sqrt() * f64::from(y[i]);
        let silu = |i: usize| f64::from(x[i]) / (1.0 + (-f64::from(x[i])).exp()) * f64::from(y[i]);
        let gelu = |i: usize| {
            let v = f64::from(x[i]);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v.powi(3));
            0.5 * v * (1.0 + inner.tanh()) * f64::from(y[i])
        };
        let cap = |i: usize| 0.7 * (f64::from(x[i]) / 0.7).tanh();
        let turned = |halves: bool| {
            let (x, y, pairs) = (x.clone(), y.clone(), len / 2);
            move |i: usize| {
                let pair = if i >= 2 * pairs {
                    None
                } else if halves {
                    Some((i % pairs, i / pairs))
                } else {
                    Some((i / 2, i % 2))
                };
                let Some((pair, second)) = pair else { return f64::from(x[i]) * 0.5 };
                let (a, b) = if halves { (pair, pairs + pair) } else { (2 * pair, 2 * pair + 1) };
                let (a, b, cos, sin) = (x[a], x[b], y[pair], y[pairs + pair]);
                let (a, b, cos, sin) = (f64::from(a), f64::from(b), f64::from(cos), f64::from(sin));
                0.5 * if second == 1 { a * sin + b * cos } else { a * cos - b * sin }
            }
        };
        let run = |table: &Kernels| -> [Vec<f32>; 6] {
            let mut out = [vec![f32::NAN; len], x.clone(), x.clone(), x.clone(), x.clone(), x.clone()];
            (table.rms_norm)(&x, &y, 1e-6, &mut out[0]);
            out[1].copy_from_slice(&y);
            (table.gate_silu)(&x, &mut out[1]);
            out[2].copy_from_slice(&y);
            (table.gate_gelu)(&x, &mut out[2]);
            (table.softcap)(&mut out[3], 0.7);
            (table.rotate_halves)(&mut out[4], &y[..len / 2 * 2], 0.5);
            (table.rotate_adjacent)(&mut out[5], &y[..len / 2 * 2], 0.5);
            out
        };
        let want = run(&SCALAR);
        let (halves, adjacent) = (turned(true), turned(false));
        let exact: [&dyn Fn(usize) -> f64; 6] = [&norm, &silu, &gelu, &cap, &halves, &adjacent];
        for (want, exact) in want.iter().zip(exact) {
            assert!((0..len).all(|i| (f64::from(want[i]) - exact(i)).abs() < 1e-6), "{len}");
        }
        for table in &available()[1..] {
            assert!(run(table).iter().zip(&want).all(|(a, b)| same_bits(a, b)), "{} {len}", table.isa);
        }
    }
}

/// Attention of queries over three tiles, each query over its own positions.
struct AttentionCase {
    dim: usize,
    softcap: Option<f32>,
    visible: Vec<std::ops::Range<usize>>,
    queries: Vec<f32>,
    keys: Vec<f16>,
    values: Vec<f16>,
}

const TILES: usize = 3;

impl AttentionCase {
    fn new(rng: &mut Rng, dim: usize, softcap: Option<f32>, visible: Vec<std::ops::Range<usize>>) -> Self {
        let mut halves = |n| rng.vector(n).iter().map(|v| f16::from_f32(*v)).collect();
        let (keys, values) = (halves(TILES * TILE * dim), halves(TILES * TILE * dim));
        let queries = rng.vector(visible.len() * dim).iter().map(|v| v * 3.0).collect();
        Self { dim, softcap, visible, queries, keys, values }
    }

    /// [queries, dim]; `wide` stores keys and values as f32.
    fn run(&self, table: &Kernels, wide: bool) -> Vec<f32> {
        let (n, tile_len) = (self.visible.len(), TILE * self.dim);
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; n], vec![0.0; n]);
        let (mut out, mut scores) = (vec![0.0; n * self.dim], vec![[f32::NAN; TILE]; n]);
        let floats = [&self.keys, &self.values].map(|all| all.iter().map(|v| v.to_f32()).collect::<Vec<f32>>());
        for t in 0..TILES {
            let part = t * tile_len..(t + 1) * tile_len;
            let (keys, values) = if wide {
                (Stored::F32(&floats[0][part.clone()]), Stored::F32(&floats[1][part]))
            } else {
                (Stored::F16(&self.keys[part.clone()]), Stored::F16(&self.values[part]))
            };
            let within = |position: usize| position.clamp(t * TILE, (t + 1) * TILE) - t * TILE;
            let visible: Vec<_> = self.visible.iter().map(|range| within(range.start)..within(range.end)).collect();
            let mut queries = AttentionQueries {
                queries: &self.queries,
                visible: &visible,
                max: &mut max,
                sum: &mut sum,
                out: &mut out,
                scores: &mut scores,
            };
            (table.attend)(
                &AttentionTile { keys, values, next_keys: (t == 0).then_some(values), softcap: self.softcap },
                &mut queries,
            );
        }
        out.chunks_mut(self.dim).zip(sum).for_each(|(out, sum)| out.iter_mut().for_each(|v| *v /= sum));
        out
    }

    /// One query's output in f64.
    fn exact(&self, c: usize) -> Vec<f64> {
        let dim = self.dim;
        let query = &self.queries[c * dim..][..dim];
        let score = |p: usize| -> f64 {
            let key = |d: usize| self.keys[p / LANES * LANES * dim + d * LANES + p % LANES].to_f64();
            let score: f64 = (0..dim).map(|d| f64::from(query[d]) * key(d)).sum();
            self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let weights: Vec<f64> = self.visible[c].clone().map(|p| score(p).exp()).collect();
        let total: f64 = weights.iter().sum();
        let value = |p: usize, d: usize| self.values[p * dim + d].to_f64();
        let sum = |d: usize| self.visible[c].clone().zip(&weights).map(|(p, w)| w * value(p, d)).sum::<f64>();
        (0..dim).map(|d| sum(d) / total).collect()
    }
}

#[test]
fn attention_has_the_scalar_bits_and_is_close_to_f64() {
    let mut rng = Rng(9);
    let ranges = [0..1, 70..192, 3..130, 127..129, 0..192, 64..128, 100..101];
    for dim in [4, 16, 40, 48, 64, 128, 256] {
        for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17] {
            let softcap = (n % 3 == 2).then_some(2.0);
            let visible = (0..n).map(|c| ranges[(c + n) % ranges.len()].clone()).collect();
            let case = AttentionCase::new(&mut rng, dim, softcap, visible);
            let want = case.run(&SCALAR, false);
            for (c, got) in want.chunks(dim).enumerate() {
                for (got, exact) in got.iter().zip(case.exact(c)) {
                    assert!((f64::from(*got) - exact).abs() < 4e-5, "{dim} {n}: {got} {exact}");
                }
            }
            for table in available() {
                for wide in [false, true] {
                    assert!(same_bits(&case.run(table, wide), &want), "{} {dim} {n} {wide}", table.isa);
                }
            }
            let alone =
                AttentionCase { visible: case.visible[..1].to_vec(), queries: case.queries[..dim].to_vec(), ..case };
            assert!(same_bits(&alone.run(&SCALAR, false), &want[..dim]), "{dim} {n}");
        }
    }
}

#[test]
fn merged_softmaxes_are_those_of_all_positions() {
    let mut rng = Rng(13);
    let (scores, values) = (rng.vector(20), rng.vector(20));
    let over = |range: std::ops::Range<usize>| -> (f64, f64, f64) {
        let max = range.clone().fold(f64::NEG_INFINITY, |max, p| max.max(f64::from(scores[p])));
        let weight = |p: usize| (f64::from(scores[p]) - max).exp();
        (max, range.clone().map(weight).sum(), range.map(|p| weight(p) * f64::from(values[p])).sum())
    };
    let (whole, first, second) = (over(0..20), over(0..7), over(7..20));
    for table in available() {
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0, [0.0]);
        for part in [first, second] {
            let later = [part.2 as f32];
            (table.merge_softmax)(part.0 as f32, part.1 as f32, &later, &mut max, &mut sum, &mut out);
        }
        assert!((f64::from(out[0] / sum) - whole.2 / whole.1).abs() < 1e-6, "{}", table.isa);
    }
}
