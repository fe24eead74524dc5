//! Attention of a batch's queries over their sequences' cached keys and values.
//!
//! Positions are cut into spans of SPAN that begin at multiples of it. A query's softmax runs over the tiles of a span in
//! order, and the spans are merged in order: so where few queries leave the team without work, spans are computed side
//! by side, with the same bits.

use crate::batch::BatchItem;
use crate::kernels::{AttentionQueries, AttentionTile, Kernels, TILE};
use crate::kv_cache::{PAGE, Sequence};
use crate::team::{Crew, Shared};
use std::cell::RefCell;
use std::ops::Range;

/// Queries that share one reading of a tile.
const QUERY_BLOCK: usize = 16;
/// Positions of a span.
const SPAN: usize = 4 * PAGE;

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

impl AttentionShape {
    /// Query heads that share keys and values.
    fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    fn visible(&self, position: usize) -> Range<usize> {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1
    }
}

/// Batch rows of one sequence, in the order of their positions.
pub struct QueryBlock {
    sequence: usize,
    /// (row of the batch, position)
    queries: Vec<(usize, usize)>,
}

impl QueryBlock {
    /// The spans that its queries see.
    fn spans(&self, shape: &AttentionShape) -> Range<usize> {
        let (first, last) = (self.queries[0].1, self.queries[self.queries.len() - 1].1);
        shape.visible(first).start / SPAN..last / SPAN + 1
    }
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

/// Running softmaxes of some queries: maxima, sums and outputs.
#[derive(Default)]
struct States {
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
}

impl States {
    /// `n` softmaxes over nothing yet.
    fn reset(&mut self, n: usize, dim: usize) {
        self.max.clear();
        self.max.resize(n, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(n, 0.0);
        self.out.clear();
        self.out.resize(n * dim, 0.0);
    }

    /// Merges those of later positions.
    fn merge(&mut self, kernels: &Kernels, later: &States) {
        let dim = self.out.len() / self.max.len();
        for c in 0..self.max.len() {
            if later.max[c] > f32::NEG_INFINITY {
                let out = &mut self.out[c * dim..(c + 1) * dim];
                let added = &later.out[c * dim..(c + 1) * dim];
                (kernels.merge_softmax)(later.max[c], later.sum[c], added, &mut self.max[c], &mut self.sum[c], out);
            }
        }
    }
}

/// What a thread needs besides, kept from one operation to the next.
#[derive(Default)]
struct Room {
    queries: Vec<f32>,
    visible: Vec<Range<usize>>,
    scores: Vec<[f32; TILE]>,
    span: States,
    total: States,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
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
    let dim = shape.head_dim;
    let out = Shared::new(out);
    let emit = |block: &QueryBlock, kv_head: usize, states: &States| {
        let heads = kv_head * shape.group()..(kv_head + 1) * shape.group();
        let places = block.queries.iter().flat_map(|(row, _)| heads.clone().map(move |head| (*row, head)));
        for (((row, head), values), sum) in places.zip(states.out.chunks_exact(dim)).zip(&states.sum) {
            let start = (row * shape.n_heads + head) * dim;
            // SAFETY: each head of each row is emitted once.
            let out = unsafe { out.part(start..start + dim) };
            out.iter_mut().zip(values).for_each(|(out, value)| *out = value / sum);
        }
    };
    if blocks.len() * shape.n_kv_heads >= 4 * crew.n_threads() {
        crew.run(blocks.len() * shape.n_kv_heads, &|chunk| {
            let (block, kv_head) = (&blocks[chunk / shape.n_kv_heads], chunk % shape.n_kv_heads);
            ROOM.with_borrow_mut(|room| {
                let mut total = std::mem::take(&mut room.total);
                total.reset(block.queries.len() * shape.group(), dim);
                for span in block.spans(&shape) {
                    attend_span(kernels, &shape, sequences[block.sequence], kv_head, block, span, q, room);
                    total.merge(kernels, &room.span);
                }
                emit(block, kv_head, &total);
                room.total = total;
            });
        });
        return;
    }
    let jobs: Vec<_> = blocks
        .iter()
        .flat_map(|block| {
            (0..shape.n_kv_heads).flat_map(move |head| block.spans(&shape).map(move |span| (block, head, span)))
        })
        .collect();
    let mut parts: Vec<States> = jobs.iter().map(|_| States::default()).collect();
    // Neighbours together, because each asks for the memory of the next.
    let at_once = jobs.len().div_ceil(2 * crew.n_threads());
    let shared_parts = Shared::new(&mut parts);
    crew.run(jobs.len().div_ceil(at_once), &|chunk| {
        let range = chunk * at_once..jobs.len().min((chunk + 1) * at_once);
        // SAFETY: each chunk takes its own parts.
        let parts = unsafe { shared_parts.part(range.clone()) };
        for (part, (block, kv_head, span)) in parts.iter_mut().zip(&jobs[range]) {
            ROOM.with_borrow_mut(|room| {
                attend_span(kernels, &shape, sequences[block.sequence], *kv_head, block, *span, q, room);
                *part = std::mem::take(&mut room.span);
            });
        }
    });
    let mut parts = parts.iter();
    for block in blocks {
        for kv_head in 0..shape.n_kv_heads {
            let mut total = States::default();
            total.reset(block.queries.len() * shape.group(), dim);
            parts.by_ref().take(block.spans(&shape).len()).for_each(|part| total.merge(kernels, part));
            emit(block, kv_head, &total);
        }
    }
}

/// `room.span` = the softmaxes of a block's queries, each with all heads that share `kv_head`, over one span.
#[allow(clippy::too_many_arguments)] // all of it is needed, and nothing belongs together
fn attend_span(
    kernels: &Kernels,
    shape: &AttentionShape,
    sequence: &Sequence,
    kv_head: usize,
    block: &QueryBlock,
    span: usize,
    q: &[f32],
    room: &mut Room,
) {
    let (dim, group) = (shape.head_dim, shape.group());
    let n = block.queries.len() * group;
    room.queries.clear();
    for (row, _) in &block.queries {
        room.queries.extend_from_slice(&q[(row * shape.n_heads + kv_head * group) * dim..][..group * dim]);
    }
    room.scores.resize(n, [0.0; TILE]);
    room.span.reset(n, dim);
    let (first, last) = (block.queries[0].1, block.queries[block.queries.len() - 1].1);
    let seen = shape.visible(first).start.max(span * SPAN)..(last + 1).min((span + 1) * SPAN);
    for page in seen.start / PAGE..seen.end.div_ceil(PAGE) {
        let within = |position: usize| {
            let range = shape.visible(position);
            let start = range.start.max(page * PAGE) - page * PAGE;
            start..range.end.min((page + 1) * PAGE).saturating_sub(page * PAGE).max(start)
        };
        room.visible.clear();
        for (_, position) in &block.queries {
            room.visible.extend(std::iter::repeat_n(within(*position), group));
        }
        let (keys, values) = sequence.tile(shape.layer, page, kv_head);
        let next_keys = ((page + 1) * PAGE <= last).then(|| sequence.tile(shape.layer, page + 1, kv_head).0);
        let mut queries = AttentionQueries {
            queries: &room.queries,
            visible: &room.visible,
            max: &mut room.span.max,
            sum: &mut room.span.sum,
            out: &mut room.span.out,
            scores: &mut room.scores,
        };
        let tile = AttentionTile { keys, values, next_keys, softcap: shape.softcap };
        (kernels.attend)(&tile, &mut queries);
    }
}
