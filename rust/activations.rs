//! The inputs of matrix products, as the kernels want them.

use crate::kernels::{
    Apart, COLUMN_TILE, GROUP, Kernels, N_APART, QUANT_BLOCK, QuantisedRow, QuantisedRows, QuantisedTiles, SUM_BLOCK,
    interleave,
};
use crate::team::{Crew, Shared};

/// Columns from which on tiles are worth their making.
const MANY: usize = 16;

/// Inputs [columns, width] as f32 and, when the weights are multiplied in integers, int8.
#[derive(Default)]
pub struct Activations {
    width: usize,
    values: Vec<f32>,
    int8: Option<Int8>,
}

/// See `QuantisedRows`.
#[derive(Default)]
struct Int8 {
    stride: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    pair_sums: Vec<[i16; 2]>,
    apart: Vec<[Apart; N_APART]>,
    tiles: Tiles,
}

/// See `QuantisedTiles`; empty where there are few columns.
#[derive(Default)]
struct Tiles {
    quants: Vec<[[i8; 4]; COLUMN_TILE]>,
    scales: Vec<[f32; COLUMN_TILE]>,
    sums: Vec<[f32; COLUMN_TILE]>,
    pair_sums: Vec<[[i16; 2]; COLUMN_TILE]>,
}

impl Int8 {
    /// Makes room; returns the columns of a chunk of work.
    fn resize(&mut self, n: usize, width: usize) -> usize {
        self.stride = width.next_multiple_of(GROUP);
        self.quants.resize(n * self.stride, 0);
        self.scales.resize(n * self.stride / QUANT_BLOCK, 0.0);
        self.sums.resize(n * self.stride / QUANT_BLOCK, 0.0);
        self.pair_sums.resize(n * self.stride / SUM_BLOCK, [0; 2]);
        self.apart.resize(n, [Apart::default(); N_APART]);
        let n_tiles = if n >= MANY { n.div_ceil(COLUMN_TILE) } else { 0 };
        let tiles = &mut self.tiles;
        tiles.quants.resize(n_tiles * self.stride / 4, [[0; 4]; COLUMN_TILE]);
        tiles.scales.resize(n_tiles * self.stride / QUANT_BLOCK, [0.0; COLUMN_TILE]);
        tiles.sums.resize(n_tiles * self.stride / QUANT_BLOCK, [0.0; COLUMN_TILE]);
        tiles.pair_sums.resize(n_tiles * self.stride / SUM_BLOCK, [[0; 2]; COLUMN_TILE]);
        if n_tiles > 0 { COLUMN_TILE } else { 1 }
    }

    fn rows(&self) -> QuantisedRows<'_> {
        let Self { stride, quants, scales, sums, pair_sums, apart, tiles } = self;
        let Tiles { quants: tile_quants, scales: tile_scales, sums: tile_sums, pair_sums: tile_pair_sums } = tiles;
        let tiles = QuantisedTiles {
            stride: *stride,
            quants: tile_quants,
            scales: tile_scales,
            sums: tile_sums,
            pair_sums: tile_pair_sums,
        };
        let tiles = (!tile_quants.is_empty()).then_some(tiles);
        QuantisedRows { stride: *stride, quants, scales, sums, pair_sums, apart, tiles }
    }
}

impl Activations {
    /// Empty; `int8` makes quantised copies of all that is filled in.
    pub fn new(int8: bool) -> Self {
        Self { int8: int8.then(Int8::default), ..Self::default() }
    }

    /// Elements of a column.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.values.len() / self.width
    }

    /// [columns, width]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The quantised copies.
    pub fn int8(&self) -> Option<QuantisedRows<'_>> {
        self.int8.as_ref().map(Int8::rows)
    }

    /// Columns of `width` elements to be written by the caller, who then calls `quantise`. What is there is of any length.
    pub fn values_mut(&mut self, width: usize) -> &mut Vec<f32> {
        self.width = width;
        &mut self.values
    }

    /// Makes the quantised copies of what `values_mut` was given.
    pub fn quantise(&mut self, crew: &Crew, kernels: &Kernels) {
        if self.int8.is_some() {
            self.fill(crew, kernels, self.columns(), self.width, |_, _| ());
        }
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
        let at_once = int8.resize(n, width);
        let (stride, has_tiles) = (int8.stride, !int8.tiles.quants.is_empty());
        let (values, quants) = (Shared::new(&mut self.values), Shared::new(&mut int8.quants));
        let (scales, sums) = (Shared::new(&mut int8.scales), Shared::new(&mut int8.sums));
        let (pair_sums, apart) = (Shared::new(&mut int8.pair_sums), Shared::new(&mut int8.apart));
        let tiles = &mut int8.tiles;
        let (tile_quants, tile_scales) = (Shared::new(&mut tiles.quants), Shared::new(&mut tiles.scales));
        let (tile_sums, tile_pair_sums) = (Shared::new(&mut tiles.sums), Shared::new(&mut tiles.pair_sums));
        crew.run(n.div_ceil(at_once), &|chunk| {
            let columns = chunk * at_once..n.min((chunk + 1) * at_once);
            let elements = |n: usize| columns.start * stride / n..columns.end * stride / n;
            // SAFETY: each chunk takes the parts of its own columns.
            let (values, quants, scales, sums, pair_sums, apart) = unsafe {
                (
                    values.part(columns.start * width..columns.end * width),
                    quants.part(elements(1)),
                    scales.part(elements(QUANT_BLOCK)),
                    sums.part(elements(QUANT_BLOCK)),
                    pair_sums.part(elements(SUM_BLOCK)),
                    apart.part(columns.clone()),
                )
            };
            for (i, c) in columns.clone().enumerate() {
                let part = |n: usize| i * stride / n..(i + 1) * stride / n;
                let values = &mut values[i * width..(i + 1) * width];
                f(c, values);
                let mut row = QuantisedRow {
                    quants: &mut quants[part(1)],
                    scales: &mut scales[part(QUANT_BLOCK)],
                    sums: &mut sums[part(QUANT_BLOCK)],
                    pair_sums: &mut pair_sums[part(SUM_BLOCK)],
                    apart: &mut apart[i],
                };
                (kernels.quantise)(values, &mut row);
            }
            if has_tiles {
                let part = |n: usize| chunk * stride / n..(chunk + 1) * stride / n;
                // SAFETY: each chunk is one tile.
                let (to_quants, to_scales, to_sums, to_pair_sums) = unsafe {
                    (
                        tile_quants.part(part(4)),
                        tile_scales.part(part(QUANT_BLOCK)),
                        tile_sums.part(part(QUANT_BLOCK)),
                        tile_pair_sums.part(part(SUM_BLOCK)),
                    )
                };
                lay_side_by_side(quants.as_chunks().0, stride / 4, to_quants);
                lay_side_by_side(scales, stride / QUANT_BLOCK, to_scales);
                lay_side_by_side(sums, stride / QUANT_BLOCK, to_sums);
                lay_side_by_side(pair_sums, stride / SUM_BLOCK, to_pair_sums);
            }
        });
    }
}

/// Columns of `len` that follow each other, side by side.
fn lay_side_by_side<T: Copy + Default>(columns: &[T], len: usize, tile: &mut [[T; COLUMN_TILE]]) {
    let columns: Vec<_> = columns.chunks_exact(len).collect();
    interleave(&columns, tile);
}
