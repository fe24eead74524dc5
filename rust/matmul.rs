//! Matrix multiplication: picks the kernel by weight type, cuts the work into chunks of rows.

use crate::activations::Activations;
use crate::kernels::{Kernels, Panels};
use crate::pack::PANEL;
use crate::team::{Crew, Shared};
use crate::weights::Weight;
use std::ops::Range;

/// Panels that a kernel gets at once, as many as its tiles can use; chunks are multiples of it.
const AT_ONCE: usize = 3;
/// Percent of the work that is in the long chunks.
const LONG_SHARE: usize = 85;

/// One product: `out` [columns, rows] = activations times `weight`, and what is done to it while it is at hand.
pub struct Product<'a> {
    /// The matrix.
    pub weight: &'a Weight,
    /// The last step.
    pub then: Then<'a>,
    /// Resized and overwritten.
    pub out: &'a mut Vec<f32>,
}

/// What is done to a product.
pub enum Then<'a> {
    /// Nothing.
    Store,
    /// One value for each row is added.
    Add(&'a [f32]),
    /// It is multiplied by a function of another product of the same activations.
    Gate {
        /// The other matrix, of the same shape.
        weight: &'a Weight,
        /// Multiplies the second argument by the function of the first.
        apply: fn(&[f32], &mut [f32]),
    },
}

/// Multiplies the same activations by several matrices, as one operation.
pub fn matmul(crew: &Crew, kernels: &Kernels, x: &Activations, products: &mut [Product]) {
    let n = x.columns();
    // Panels of all matrices are counted through.
    let mut first_panel = vec![0];
    let mut jobs = Vec::with_capacity(products.len());
    for product in products {
        let weight = product.weight;
        assert_eq!(weight.cols, x.width(), "width of the activations");
        if let Then::Gate { weight: gate, .. } = &product.then {
            assert_eq!((gate.rows, gate.cols), (weight.rows, weight.cols), "shape of the gate");
        }
        first_panel.push(first_panel[jobs.len()] + weight.rows.div_ceil(PANEL));
        product.out.resize(n * weight.rows, 0.0);
        jobs.push((weight, &product.then, Shared::new(product.out)));
    }
    let chunks = guided_chunks(first_panel[jobs.len()], crew.n_threads());
    crew.run(chunks.len(), &|chunk| {
        let mut lanes = vec![[0.0; PANEL]; AT_ONCE * n];
        let mut gate_lanes = Vec::new();
        let mut next = chunks[chunk].start;
        while next < chunks[chunk].end {
            let job = first_panel.partition_point(|first| *first <= next) - 1;
            let end = chunks[chunk].end.min(first_panel[job + 1]).min(next + AT_ONCE);
            let (weight, then, out) = &jobs[job];
            let panels = next - first_panel[job]..end - first_panel[job];
            let lanes = &mut lanes[..panels.len() * n];
            multiply(kernels, &weight.panels(panels.clone()), x, lanes);
            if let Then::Gate { weight, apply } = then {
                gate_lanes.resize(lanes.len(), [0.0; PANEL]);
                multiply(kernels, &weight.panels(panels.clone()), x, &mut gate_lanes);
                apply(gate_lanes.as_flattened(), lanes.as_flattened_mut());
            }
            let rows = panels.start * PANEL..weight.rows.min(panels.end * PANEL);
            for c in 0..n {
                // SAFETY: each panel belongs to one chunk, which takes its rows of every column.
                let out = unsafe { out.part(c * weight.rows + rows.start..c * weight.rows + rows.end) };
                for (out, lanes) in out.chunks_mut(PANEL).zip(lanes.iter().skip(c).step_by(n)) {
                    match out.first_chunk_mut() {
                        Some(out) => *out = *lanes,
                        None => out.copy_from_slice(&lanes[..out.len()]), // the last rows
                    }
                }
                if let Then::Add(bias) = then {
                    (kernels.add)(out, &bias[rows.clone()]);
                }
            }
            next = end;
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
        let len = len.max(1).next_multiple_of(AT_ONCE).min(rest);
        chunks.push(start..start + len);
        start += len;
    }
    chunks
}

/// `out` [panels, columns] = panels times columns.
fn multiply(kernels: &Kernels, panels: &Panels, x: &Activations, out: &mut [[f32; PANEL]]) {
    match x.int8() {
        Some(int8) if panels.dtype.is_quantised() => (kernels.matmul_int8)(panels, &int8, out),
        _ => (kernels.matmul_f32)(panels, x.values(), out),
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
                assert!(chunks.first().is_none_or(
                    |first| first.start == 0 && first.len() <= n.div_ceil(n_threads).next_multiple_of(AT_ONCE)
                ));
            }
        }
    }
}
