//! Matrix multiplication: picks the kernel by weight type, cuts the work into chunks of rows.

use crate::kernels::{GROUP, Kernels, Panel, QUANT_BLOCK, QuantisedRow, QuantisedRows};
use crate::pack::PANEL;
use crate::team::{Crew, Shared};
use crate::weights::Weight;

/// Panels of one chunk of work.
const CHUNK_PANELS: usize = 2;

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
        let stride = width.next_multiple_of(GROUP);
        let n_blocks = stride / QUANT_BLOCK;
        int8.stride = stride;
        int8.quants.resize(n * stride, 0);
        int8.scales.resize(n * n_blocks, 0.0);
        int8.sums.resize(n * n_blocks, 0.0);
        let (values, quants) = (Shared::new(&mut self.values), Shared::new(&mut int8.quants));
        let (scales, sums) = (Shared::new(&mut int8.scales), Shared::new(&mut int8.sums));
        crew.run(n, &|c| {
            let blocks = c * n_blocks..(c + 1) * n_blocks;
            // SAFETY: each chunk takes the parts of its own column.
            let (values, mut row) = unsafe {
                (
                    values.part(c * width..(c + 1) * width),
                    QuantisedRow {
                        quants: quants.part(c * stride..(c + 1) * stride),
                        scales: scales.part(blocks.clone()),
                        sums: sums.part(blocks),
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
    let mut first_chunk = Vec::with_capacity(products.len() + 1);
    first_chunk.push(0);
    let mut jobs = Vec::with_capacity(products.len());
    for product in products {
        let weight = product.weight;
        assert_eq!(weight.cols, x.width, "width of the activations");
        first_chunk.push(first_chunk[jobs.len()] + weight.rows.div_ceil(CHUNK_PANELS * PANEL));
        product.out.resize(n * weight.rows, 0.0);
        jobs.push((weight, product.bias, Shared::new(product.out)));
    }
    crew.run(first_chunk[jobs.len()], &|chunk| {
        let job = first_chunk.partition_point(|first| *first <= chunk) - 1;
        let (weight, bias, out) = &jobs[job];
        let start = (chunk - first_chunk[job]) * CHUNK_PANELS;
        let mut lanes = vec![[0.0; PANEL]; n];
        for panel in start..weight.rows.div_ceil(PANEL).min(start + CHUNK_PANELS) {
            multiply(kernels, &weight.panel(panel), x, &mut lanes);
            let rows = panel * PANEL..weight.rows.min((panel + 1) * PANEL);
            for (c, lanes) in lanes.iter().enumerate() {
                // SAFETY: each chunk takes its own rows of every column.
                let out = unsafe { out.part(c * weight.rows + rows.start..c * weight.rows + rows.end) };
                out.copy_from_slice(&lanes[..rows.len()]);
                if let Some(bias) = bias {
                    (kernels.add)(out, &bias[rows.clone()]);
                }
            }
        }
    });
}

/// `out[c][r]` = row r of the panel times column c.
fn multiply(kernels: &Kernels, panel: &Panel, x: &Activations, out: &mut [[f32; PANEL]]) {
    match &x.int8 {
        Some(Int8 { stride, quants, scales, sums }) if panel.dtype.is_quantised() => {
            (kernels.matmul_int8)(panel, &QuantisedRows { stride: *stride, quants, scales, sums }, out);
        }
        _ => (kernels.matmul_f32)(panel, &x.values, out),
    }
}
