//! Matrix multiplication: picks the kernel by weight type, cuts the work into chunks of rows.

use crate::kernels::{Apart, GROUP, Kernels, N_APART, Panel, QUANT_BLOCK, QuantisedRow, QuantisedRows, SUM_BLOCK};
use crate::pack::PANEL;
use crate::team::{Crew, Shared};
use crate::weights::Weight;
use std::ops::Range;

/// Panels of the smallest chunk of work.
const MIN_CHUNK: usize = 2;
/// Percent of the work that is in the long chunks.
const LONG_SHARE: usize = 85;

/// The inputs of a multiplication, [columns, width], as f32 and (when the weights are multiplied in integers) int8.
#[derive(Default)]
pub struct Activations {
    width: usize,
    values: Vec<f32>,
    int8: Option<Int8>,
}

#[derive(Default)]
struct Int8 {
    stride: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    pair_sums: Vec<[i16; 2]>,
    apart: Vec<[Apart; N_APART]>,
}

impl Int8 {
    fn resize(&mut self, n: usize, width: usize) {
        self.stride = width.next_multiple_of(GROUP);
        self.quants.resize(n * self.stride, 0);
        self.scales.resize(n * self.stride / QUANT_BLOCK, 0.0);
        self.sums.resize(n * self.stride / QUANT_BLOCK, 0.0);
        self.pair_sums.resize(n * self.stride / SUM_BLOCK, [0; 2]);
        self.apart.resize(n, [Apart::default(); N_APART]);
    }

    fn rows(&self) -> QuantisedRows<'_> {
        let Self { stride, quants, scales, sums, pair_sums, apart } = self;
        QuantisedRows { stride: *stride, quants, scales, sums, pair_sums, apart }
    }
}

impl Activations {
    /// Empty; `int8` makes quantised copies of all that is filled in.
    pub fn new(int8: bool) -> Self {
        Self { int8: int8.then(Int8::default), ..Self::default() }
    }

    /// Takes `n` columns of `width` elements, column c written by `f(c, ..)`.
    pub fn fill(
        &mut self,
        crew: &Crew,
        kernels: &Kernels,
        n: usize,
        width: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.width = width;
        self.values.resize(n * width, 0.0);
        let Some(int8) = &mut self.int8 else {
            crew.for_rows(&mut self.values, width, f);
            return;
        };
        int8.resize(n, width);
        let stride = int8.stride;
        let (values, quants) = (Shared::new(&mut self.values), Shared::new(&mut int8.quants));
        let (scales, sums) = (Shared::new(&mut int8.scales), Shared::new(&mut int8.sums));
        let (pair_sums, apart) = (Shared::new(&mut int8.pair_sums), Shared::new(&mut int8.apart));
        crew.run(n, &|c| {
            let blocks = |len: usize| c * (stride / len)..(c + 1) * (stride / len);
            // SAFETY: each chunk takes the parts of its own column.
            let (values, mut row) = unsafe {
                (
                    values.part(c * width..(c + 1) * width),
                    QuantisedRow {
                        quants: quants.part(blocks(1)),
                        scales: scales.part(blocks(QUANT_BLOCK)),
                        sums: sums.part(blocks(QUANT_BLOCK)),
                        pair_sums: pair_sums.part(blocks(SUM_BLOCK)),
                        apart: &mut apart.part(c..c + 1)[0],
                    },
                )
            };
            f(c, values);
            (kernels.quantise)(values, &mut row);
        });
    }
}

/// One product: `out` [columns, rows] = activations times `weight`, plus `bias`.
pub struct Product<'a> {
    /// The matrix.
    pub weight: &'a Weight,
    /// One value for each row.
    pub bias: Option<&'a [f32]>,
    /// Resized and overwritten.
    pub out: &'a mut Vec<f32>,
}

/// Multiplies the same activations by several matrices, as one operation.
pub fn matmul(crew: &Crew, kernels: &Kernels, x: &Activations, products: &mut [Product]) {
    let n = x.values.len() / x.width;
    // Panels of all matrices are counted through.
    let mut first_panel = vec![0];
    let mut jobs = Vec::with_capacity(products.len());
    for product in products {
        let weight = product.weight;
        assert_eq!(weight.cols, x.width, "width of the activations");
        first_panel.push(first_panel[jobs.len()] + weight.rows.div_ceil(PANEL));
        product.out.resize(n * weight.rows, 0.0);
        jobs.push((weight, product.bias, Shared::new(product.out)));
    }
    let chunks = guided_chunks(first_panel[jobs.len()], crew.n_threads());
    crew.run(chunks.len(), &|chunk| {
        let mut lanes = vec![[0.0; PANEL]; n];
        for global in chunks[chunk].clone() {
            let job = first_panel.partition_point(|first| *first <= global) - 1;
            let (weight, bias, out) = &jobs[job];
            let panel = global - first_panel[job];
            multiply(kernels, &weight.panel(panel), x, &mut lanes);
            let rows = panel * PANEL..weight.rows.min((panel + 1) * PANEL);
            for (c, lanes) in lanes.iter().enumerate() {
                // SAFETY: each panel belongs to one chunk, which takes its rows of every column.
                let out = unsafe { out.part(c * weight.rows + rows.start..c * weight.rows + rows.end) };
                out.copy_from_slice(&lanes[..rows.len()]);
                if let Some(bias) = bias {
                    (kernels.add)(out, &bias[rows.clone()]);
                }
            }
        }
    });
}

/// Cuts `n` panels into a long chunk for each thread and short ones of what is left: long ones because a thread reads
/// memory fastest in one stream, short ones so that all threads end together.
fn guided_chunks(n: usize, n_threads: usize) -> Vec<Range<usize>> {
    let mut chunks = Vec::new();
    let mut start = 0;
    while start < n {
        let rest = n - start;
        let len = if chunks.len() < n_threads { n * LONG_SHARE / 100 / n_threads } else { rest / (2 * n_threads) };
        let len = len.max(MIN_CHUNK).min(rest);
        chunks.push(start..start + len);
        start += len;
    }
    chunks
}

/// `out[c][r]` = row r of the panel times column c.
fn multiply(kernels: &Kernels, panel: &Panel, x: &Activations, out: &mut [[f32; PANEL]]) {
    match &x.int8 {
        Some(int8) if panel.dtype.is_quantised() => (kernels.matmul_int8)(panel, &int8.rows(), out),
        _ => (kernels.matmul_f32)(panel, &x.values, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_panels_and_shrink() {
        for n in [0, 1, 2, 3, 7, 40, 1000] {
            for n_threads in [1, 2, 3, 16] {
                let chunks = guided_chunks(n, n_threads);
                assert_eq!(chunks.iter().map(Range::len).sum::<usize>(), n);
                assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() >= pair[1].len()));
                assert!(
                    chunks.first().is_none_or(|first| first.start == 0 && first.len() <= n.div_ceil(n_threads).max(2))
                );
            }
        }
    }
}
