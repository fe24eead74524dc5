//! Products of stored rows with vectors, a group of up to 256 weights at a time.

use super::Rung;
use crate::kernels::{Apart, GROUP, Kernels, N_APART, QUANT_BLOCK, QuantisedRow, SUM_BLOCK};
use crate::quant::DType;
use crate::quant::blocks::{self, Unpacked};

/// Weights that are decoded at once.
pub const AT_ONCE: usize = 256;
/// Sums of one vector register.
pub const WIDTH: usize = 8;
/// Activations that share a scale on the coarse rungs.
const COARSE: usize = 256;

/// A stored row.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub dtype: DType,
    pub bytes: &'a [u8],
    pub cols: usize,
}

impl<'a> Row<'a> {
    /// The row's groups: first column, number of columns, bytes.
    #[inline(always)]
    pub fn groups(self) -> impl Iterator<Item = (usize, usize, &'a [u8])> {
        let bytes = AT_ONCE / self.dtype.block_len() * self.dtype.block_bytes();
        self.bytes.chunks(bytes).enumerate().map(move |(i, group)| {
            let start = i * AT_ONCE;
            (start, AT_ONCE.min(self.cols - start), group)
        })
    }
}

/// The input of a product.
pub struct Vector {
    pub values: Vec<f32>,
    /// Sum of each SUM_BLOCK values.
    pub sums: Vec<f32>,
    pub int8: Option<Int8>,
}

/// A vector in int8: element i is quants[i] * scales[i / QUANT_BLOCK], but for those apart.
pub struct Int8 {
    pub quants: Vec<i8>,
    pub scales: Vec<f32>,
    /// Sum of each SUM_BLOCK quants, times its scale.
    pub sums: Vec<f32>,
    pub apart: Vec<Apart>,
}

impl Vector {
    /// A vector as the rung multiplies it.
    pub fn new(rung: Rung, kernels: &Kernels, values: &[f32]) -> Self {
        let int8 = match rung {
            _ if rung >= Rung::FineScales => Some(Int8::fine(kernels, values)),
            _ if rung >= Rung::Integers => Some(Int8::coarse(values)),
            _ => None,
        };
        let sums = values.chunks(SUM_BLOCK).map(|part| part.iter().sum()).collect();
        Self { values: values.to_vec(), sums, int8 }
    }
}

impl Int8 {
    /// One scale for COARSE elements.
    fn coarse(values: &[f32]) -> Self {
        let padded = values.len().next_multiple_of(GROUP);
        let (mut quants, mut scales) = (vec![0; padded], vec![0.0; padded / QUANT_BLOCK]);
        for (i, part) in values.chunks(COARSE).enumerate() {
            let largest = part.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            for (quant, value) in quants[i * COARSE..].iter_mut().zip(part) {
                *quant = (value * inverse).round_ties_even() as i8;
            }
            scales[i * COARSE / QUANT_BLOCK..].iter_mut().take(part.len().div_ceil(QUANT_BLOCK)).for_each(|scale| {
                *scale = largest / 127.0;
            });
        }
        Self::with_sums(quants, scales, Vec::new())
    }

    /// As the engine does it.
    fn fine(kernels: &Kernels, values: &[f32]) -> Self {
        let padded = values.len().next_multiple_of(GROUP);
        let (mut quants, mut scales) = (vec![0; padded], vec![0.0; padded / QUANT_BLOCK]);
        let mut apart = [Apart::default(); N_APART];
        let mut row = QuantisedRow {
            quants: &mut quants,
            scales: &mut scales,
            sums: &mut vec![0.0; padded / QUANT_BLOCK],
            pair_sums: &mut vec![[0; 2]; padded / SUM_BLOCK],
            apart: &mut apart,
        };
        (kernels.quantise)(values, &mut row);
        Self::with_sums(quants, scales, apart.to_vec())
    }

    fn with_sums(quants: Vec<i8>, scales: Vec<f32>, apart: Vec<Apart>) -> Self {
        let sum = |(i, part): (usize, &[i8])| {
            scales[i * SUM_BLOCK / QUANT_BLOCK] * part.iter().map(|q| i32::from(*q)).sum::<i32>() as f32
        };
        let sums = quants.chunks(SUM_BLOCK).enumerate().map(sum).collect();
        Self { quants, scales, sums, apart }
    }
}

/// Row times vectors, one sum after the other, as plain code does it.
pub fn one_by_one(row: Row, x: &[Vector], out: &mut [f32]) {
    let mut weights = [0.0; AT_ONCE];
    out.fill(0.0);
    for (start, n, bytes) in row.groups() {
        blocks::decode(row.dtype, bytes, &mut weights[..n]);
        for (out, x) in out.iter_mut().zip(x) {
            for (weight, value) in weights[..n].iter().zip(&x.values[start..]) {
                *out += weight * value;
            }
        }
    }
}

/// SUMS registers of WIDTH sums.
pub type Sums<const SUMS: usize> = [[f32; WIDTH]; SUMS];

/// The same with several sums at a time, and scales applied to sums instead of weights. `quants` adds scaled products of
/// a group's quants with a vector to the sums, `floats` products of floats.
#[inline(always)]
pub fn in_lanes<const SUMS: usize>(
    row: Row,
    x: &[Vector],
    out: &mut [f32],
    quants: impl Fn(&Unpacked, &[f32], &mut Sums<SUMS>),
    floats: impl Fn(&[f32], &[f32], &mut Sums<SUMS>),
) {
    let (mut unpacked, mut weights) = (Unpacked::default(), [0.0; AT_ONCE]);
    let mut sums = vec![[[0.0; WIDTH]; SUMS]; x.len()];
    for (start, n, bytes) in row.groups() {
        if row.dtype.is_quantised() {
            blocks::unpack(row.dtype, bytes, &mut unpacked);
        } else {
            blocks::decode(row.dtype, bytes, &mut weights[..n]);
        }
        for (sums, x) in sums.iter_mut().zip(x) {
            if row.dtype.is_quantised() {
                quants(&unpacked, &x.values[start..start + n], sums);
                for (min, x_sum) in unpacked.mins[..n / SUM_BLOCK].iter().zip(&x.sums[start / SUM_BLOCK..]) {
                    sums[0][0] -= min * x_sum;
                }
            } else {
                floats(&weights[..n], &x.values[start..start + n], sums);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(&sums) {
        *out = total(sums);
    }
}

/// The sum of all: registers first, because a chain of additions takes four cycles for each.
#[inline(always)]
fn total<const SUMS: usize>(sums: &Sums<SUMS>) -> f32 {
    let mut lanes = [0.0; WIDTH];
    for sum in sums {
        lanes.iter_mut().zip(sum).for_each(|(lane, sum)| *lane += sum);
    }
    add_up(lanes)
}

/// The sum of one register, in pairs.
#[inline(always)]
pub fn add_up([a, b, c, d, e, f, g, h]: [f32; WIDTH]) -> f32 {
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// Adds scaled products of quants in portable code.
pub fn add_scaled<const SUMS: usize>(w: &Unpacked, x: &[f32], sums: &mut Sums<SUMS>) {
    for (i, (quants, x)) in w.quants.chunks_exact(SUM_BLOCK).zip(x.chunks_exact(SUM_BLOCK)).enumerate() {
        for (lane, sum) in sums[i % SUMS].iter_mut().enumerate() {
            let products = f32::from(quants[lane]) * x[lane] + f32::from(quants[WIDTH + lane]) * x[WIDTH + lane];
            *sum += w.scales[i] * products;
        }
    }
}

/// The inner product of two vectors of floats, in the same way.
#[inline(always)]
pub fn dense_in_lanes<const SUMS: usize>(w: &[f32], x: &[f32], add: impl Fn(&[f32], &[f32], &mut Sums<SUMS>)) -> f32 {
    let mut sums = [[0.0; WIDTH]; SUMS];
    add(w, x, &mut sums);
    total(&sums)
}

/// Adds products in portable code, the compiler finding the vectors.
pub fn add_products<const SUMS: usize>(w: &[f32], x: &[f32], sums: &mut Sums<SUMS>) {
    let whole = w.len() / (SUMS * WIDTH) * (SUMS * WIDTH);
    for (w, x) in w.chunks_exact(SUMS * WIDTH).zip(x.chunks_exact(SUMS * WIDTH)) {
        for (sum, (w, x)) in sums.as_flattened_mut().iter_mut().zip(w.iter().zip(x)) {
            *sum += w * x;
        }
    }
    add_rest(&w[whole..], &x[whole..], sums);
}

/// Adds the products that do not fill all registers.
#[inline(always)]
pub fn add_rest<const SUMS: usize>(w: &[f32], x: &[f32], sums: &mut Sums<SUMS>) {
    for (i, (w, x)) in w.iter().zip(x).enumerate() {
        sums[0][i % WIDTH] += w * x;
    }
}

/// Row times vectors in int8.
#[inline(always)]
pub fn in_integers(row: Row, x: &[Vector], out: &mut [f32], products: impl Fn(&Unpacked, usize, &Int8, usize) -> f32) {
    let mut weights = Unpacked::default();
    out.fill(0.0);
    for (start, n, bytes) in row.groups() {
        blocks::unpack(row.dtype, bytes, &mut weights);
        for (out, x) in out.iter_mut().zip(x) {
            let x = x.int8.as_ref().expect("quantised on this rung");
            let mut sum = products(&weights, n, x, start);
            for (min, x_sum) in weights.mins[..n / SUM_BLOCK].iter().zip(&x.sums[start / SUM_BLOCK..]) {
                sum -= min * x_sum;
            }
            for apart in &x.apart {
                let at = (apart.index as usize).wrapping_sub(start);
                if at < n {
                    let scale = weights.scales[at / SUM_BLOCK];
                    sum += (scale * f32::from(weights.quants[at]) - weights.mins[at / SUM_BLOCK]) * apart.value;
                }
            }
            *out += sum;
        }
    }
}

/// The scaled products of a group of `n` weights with the vector from `start` on.
pub fn integer_products(w: &Unpacked, n: usize, x: &Int8, start: usize) -> f32 {
    let mut sum = 0.0;
    for (i, (w_part, x_part)) in w.quants[..n].chunks(SUM_BLOCK).zip(x.quants[start..].chunks(SUM_BLOCK)).enumerate() {
        let total: i32 = w_part.iter().zip(x_part).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        sum += w.scales[i] * x.scales[start / QUANT_BLOCK + i * SUM_BLOCK / QUANT_BLOCK] * total as f32;
    }
    sum
}

/// Multiplies a stored row by vectors.
pub type DotRow = fn(Row, &[Vector], &mut [f32]);
/// Multiplies two vectors of floats.
pub type DotDense = fn(&[f32], &[f32]) -> f32;

/// The functions of an instruction set.
pub struct Functions {
    /// One register of sums.
    pub one: (DotRow, DotDense),
    /// Four.
    pub four: (DotRow, DotDense),
    /// Integers.
    pub integers: DotRow,
}

static PORTABLE: Functions = Functions {
    one: (
        |row, x, out| in_lanes::<1>(row, x, out, add_scaled, add_products),
        |w, x| dense_in_lanes::<1>(w, x, add_products),
    ),
    four: (
        |row, x, out| in_lanes::<4>(row, x, out, add_scaled, add_products),
        |w, x| dense_in_lanes::<4>(w, x, add_products),
    ),
    integers: |row, x, out| in_integers(row, x, out, integer_products),
};

fn functions() -> &'static Functions {
    #[cfg(target_arch = "x86_64")]
    if let Some(functions) = super::avx2::functions() {
        return functions;
    }
    &PORTABLE
}

/// The function of a rung for stored weights of a type.
pub fn dot_row(rung: Rung, dtype: DType) -> DotRow {
    match rung {
        _ if rung < Rung::Simd => one_by_one,
        _ if rung >= Rung::Integers && dtype.is_quantised() => functions().integers,
        _ if rung >= Rung::Accumulators => functions().four.0,
        _ => functions().one.0,
    }
}

/// The function of a rung for floats.
pub fn dot_dense(rung: Rung) -> DotDense {
    match rung {
        _ if rung < Rung::Simd => |w, x| w.iter().zip(x).map(|(w, x)| w * x).sum(),
        _ if rung >= Rung::Accumulators => functions().four.1,
        _ => functions().one.1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    /// Bytes of a row of every type, with scales that are ordinary numbers.
    fn row_bytes(dtype: DType, cols: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..dtype.row_bytes(cols).unwrap()).map(|i| (i * 73 + i / 7 * 11 + 5) as u8).collect();
        match dtype {
            DType::F32 => bytes.chunks_mut(4).enumerate().for_each(|(i, b)| {
                b.copy_from_slice(&((i % 17) as f32 / 8.0 - 1.0).to_le_bytes());
            }),
            DType::F16 => bytes.chunks_mut(2).for_each(|b| b[1] = 0x34 | b[1] & 0x83),
            DType::BF16 => bytes.chunks_mut(2).for_each(|b| b[1] = 0x3e | b[1] & 0x80),
            _ => {
                for block in bytes.chunks_mut(dtype.block_bytes()) {
                    // Scales and minimums are f16; those of Q6_K stand at the end.
                    let ends = match dtype {
                        DType::Q6_K => vec![209],
                        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => vec![1],
                        _ => vec![1, 3],
                    };
                    ends.into_iter().for_each(|i| block[i] = 0x20);
                }
            }
        }
        bytes
    }

    #[test]
    fn every_rung_gives_the_product_of_every_type() {
        let cols = 512;
        for dtype in DType::all() {
            let bytes = row_bytes(dtype, cols);
            let row = Row { dtype, bytes: &bytes, cols };
            let mut weights = vec![0.0; cols];
            blocks::decode(dtype, &bytes, &mut weights);
            let values = |seed: usize| -> Vec<f32> {
                (0..cols).map(|i| (((i * 37 + seed * 19) % 101) as f32 - 50.0) / 25.0).collect()
            };
            for (rung, name) in Rung::ALL.into_iter().filter(|row| row.0 < Rung::Panels) {
                let x: Vec<_> =
                    (0..3).map(|seed| Vector::new(rung, kernels::choose().unwrap(), &values(seed))).collect();
                let mut out = [0.0; 3];
                dot_row(rung, dtype)(row, &x, &mut out);
                for (out, x) in out.iter().zip(&x) {
                    let pairs = || weights.iter().zip(&x.values);
                    let want: f64 = pairs().map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let size: f64 = pairs().map(|(w, x)| f64::from(w * x).powi(2)).sum::<f64>().sqrt();
                    let limit = if rung >= Rung::Integers && dtype.is_quantised() { 0.03 } else { 1e-5 };
                    assert!((f64::from(*out) - want).abs() < limit * size, "{name} {}: {out} {want}", dtype.name());
                }
            }
        }
    }
}
