//! Attention of a batch's queries over their sequences' cached keys and values.

use crate::batch::BatchItem;
use crate::kernels::{AttentionTile, Kernels, SoftmaxState};
use crate::kv_cache::{PAGE, Sequence};
use crate::team::{Crew, Shared};
use std::cell::RefCell;
use std::ops::Range;

/// Queries that share one reading of a tile.
const QUERY_BLOCK: usize = 16;

thread_local! {
    /// Each thread's tile and running sums; grows to the largest head.
    static ROOM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Sizes and rules of one layer's attention.
#[derive(Clone, Copy)]
pub struct AttentionShape {
    /// Index of the layer.
    pub layer: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; query head h uses h * n_kv_heads / n_heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Position i sees positions i - window + 1 ..= i.
    pub window: Option<usize>,
    /// Scores s become cap * tanh(s / cap).
    pub softcap: Option<f32>,
}

/// Batch rows of one sequence, in the order of their positions.
pub struct QueryBlock {
    sequence: usize,
    /// (row of the batch, position)
    queries: Vec<(usize, usize)>,
}

/// Groups a batch into blocks of queries that share their sequence.
pub fn query_blocks(batch: &[BatchItem], n_sequences: usize) -> Vec<QueryBlock> {
    let mut queries = vec![Vec::new(); n_sequences];
    for (row, item) in batch.iter().enumerate() {
        queries[item.sequence].push((row, item.position));
    }
    let blocks_of = |(sequence, queries): (usize, Vec<(usize, usize)>)| -> Vec<QueryBlock> {
        queries.chunks(QUERY_BLOCK).map(|q| QueryBlock { sequence, queries: q.to_vec() }).collect()
    };
    queries.into_iter().enumerate().flat_map(blocks_of).collect()
}

/// `out` [rows, heads, head_dim] = attention of `q` (same shape, scaled, turned) over the sequences' keys and values,
/// those of the batch itself included.
pub fn attention(
    crew: &Crew,
    kernels: &Kernels,
    shape: AttentionShape,
    sequences: &[&mut Sequence],
    blocks: &[QueryBlock],
    q: &[f32],
    out: &mut [f32],
) {
    // Heads that share keys and values read them once, unless that leaves too little work to share out.
    let group = shape.n_heads / shape.n_kv_heads;
    let together = if blocks.len() * shape.n_kv_heads >= 4 * crew.n_threads() { group } else { 1 };
    let n_chunks = shape.n_heads / together;
    let out = Shared::new(out);
    crew.run(blocks.len() * n_chunks, &|chunk| {
        let (block, first) = (&blocks[chunk / n_chunks], chunk % n_chunks * together);
        let at = |row: usize, head: usize| (row * shape.n_heads + head) * shape.head_dim;
        let query = |row: usize, head: usize| &q[at(row, head)..][..shape.head_dim];
        let heads = first..first + together;
        attend_block(kernels, shape, sequences[block.sequence], heads, block, query, |row, head, values| {
            let start = at(row, head);
            // SAFETY: each chunk takes its own heads of its own rows.
            unsafe { out.part(start..start + shape.head_dim) }.copy_from_slice(values);
        });
    });
}

/// Attention of heads that share keys and values over one block of queries, tile by tile in the order of positions.
fn attend_block<'q>(
    kernels: &Kernels,
    shape: AttentionShape,
    sequence: &Sequence,
    heads: Range<usize>,
    block: &QueryBlock,
    query: impl Fn(usize, usize) -> &'q [f32],
    mut emit: impl FnMut(usize, usize, &[f32]),
) {
    let dim = shape.head_dim;
    let kv_head = heads.start * shape.n_kv_heads / shape.n_heads;
    let visible = |position: usize| shape.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
    let pages = visible(block.queries[0].1).start / PAGE..=block.queries[block.queries.len() - 1].1 / PAGE;
    // Each query with each head: (row, position, head).
    let items = block.queries.iter().flat_map(|(row, position)| heads.clone().map(move |head| (*row, *position, head)));
    ROOM.with_borrow_mut(|room| {
        let n = block.queries.len() * heads.len();
        room.resize((2 * PAGE + n + 1) * dim, 0.0);
        let (tile_room, rest) = room.split_at_mut(2 * PAGE * dim);
        let (sums, scratch) = rest.split_at_mut(n * dim);
        sums.fill(0.0);
        let mut states = vec![(f32::NEG_INFINITY, 0.0); n];
        for page in pages {
            let (keys, values) = sequence.read(shape.layer, page, kv_head, tile_room);
            for ((state, out), (row, position, head)) in
                states.iter_mut().zip(sums.chunks_exact_mut(dim)).zip(items.clone())
            {
                let range = visible(position);
                let (first, end) = (range.start.max(page * PAGE), range.end.min((page + 1) * PAGE));
                if first >= end {
                    continue;
                }
                let (first, end) = (first - page * PAGE, end - page * PAGE);
                let query = query(row, head);
                let tile = AttentionTile { query, keys, values, first, end, softcap: shape.softcap };
                let mut running = SoftmaxState { max: state.0, sum: state.1, out, scratch };
                (kernels.attend)(&tile, &mut running);
                *state = (running.max, running.sum);
            }
        }
        for ((state, out), (row, _, head)) in states.iter().zip(sums.chunks_exact_mut(dim)).zip(items) {
            out.iter_mut().for_each(|v| *v /= state.1);
            emit(row, head, out);
        }
    });
}
