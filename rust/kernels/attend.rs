//! Attention of queries over one tile of keys and values.
//!
//! Every tile is summed against its own maximum and then merged (the running softmax of Milakov and Gimelshein, 2018), so
//! a tile may be computed anywhere, as long as tiles are merged in order. Scores sum over elements in order, outputs over
//! positions in order, both with fused multiply-adds: positions that a query does not see get a weight of 0, which leaves
//! a sum as it is.

#![allow(unsafe_op_in_unsafe_fn)] // every unsafe function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over lanes, queries and positions read best by index

use super::math::{self, LANES, Lanes};
use super::plain::{F16, F32, Plain};
use super::prefetch::{self, prefetch_lines};
use super::simd::Simd;
use crate::quant::blocks::f16_to_f32;
use half::f16;
use std::ops::Range;

/// Positions of an attention tile, and of a K/V page.
pub const TILE: usize = 64;

/// Keys or values as they are stored.
#[derive(Clone, Copy)]
#[allow(missing_docs)] // the types' names
pub enum Stored<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
}

/// Keys and values of TILE consecutive positions.
#[derive(Clone, Copy)]
pub struct AttentionTile<'a> {
    /// [TILE / LANES, head_dim, LANES]: lane i of group g is position LANES * g + i.
    pub keys: Stored<'a>,
    /// [TILE, head_dim]
    pub values: Stored<'a>,
    /// Keys that will be needed after these, to be asked for in time.
    pub next_keys: Option<Stored<'a>>,
    /// Scores s become cap * tanh(s / cap).
    pub softcap: Option<f32>,
}

impl Stored<'_> {
    fn address(&self) -> *const u8 {
        match self {
            Stored::F16(data) => data.as_ptr().cast(),
            Stored::F32(data) => data.as_ptr().cast(),
        }
    }
}

/// Queries, and what they have gathered from the tiles so far.
pub struct AttentionQueries<'a> {
    /// [queries, head_dim]
    pub queries: &'a [f32],
    /// Each query's visible positions within the tile; none is possible.
    pub visible: &'a [Range<usize>],
    /// Each query's largest score so far; minus infinity at the start.
    pub max: &'a mut [f32],
    /// Sums of e^(score - max).
    pub sum: &'a mut [f32],
    /// Sums of e^(score - max) times the values, [queries, head_dim].
    pub out: &'a mut [f32],
    /// Room for scores, [queries].
    pub scores: &'a mut [[f32; TILE]],
}

/// Factors that merge a tile: of what was there, and of what the tile adds.
type Factors = (f32, f32);

/// Merges the softmax over later positions into a query's own; `later_out` and `out` are [head_dim].
#[inline(always)]
pub fn merge_softmax(later_max: f32, later_sum: f32, later_out: &[f32], max: &mut f32, sum: &mut f32, out: &mut [f32]) {
    let (old, new) = merge_sums(later_max, later_sum, max, sum);
    for (out, later) in out.iter_mut().zip(later_out) {
        *out = later.mul_add(new, *out * old);
    }
}

#[inline(always)]
fn merge_sums(later_max: f32, later_sum: f32, max: &mut f32, sum: &mut f32) -> Factors {
    let new_max = if later_max > *max { later_max } else { *max };
    let (old, new) = (math::exp(*max - new_max), math::exp(later_max - new_max));
    *sum = *sum * old + later_sum * new;
    *max = new_max;
    (old, new)
}

/// Turns a query's scores into weights e^(score - max), 0 where it does not see, and merges their sum.
#[inline(always)]
fn softmax(
    scores: &mut [f32; TILE],
    visible: &Range<usize>,
    softcap: Option<f32>,
    state_max: &mut f32,
    state_sum: &mut f32,
) -> Factors {
    if let Some(cap) = softcap {
        for score in scores.iter_mut() {
            *score = cap * math::tanh(*score / cap);
        }
    }
    scores[..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end..].fill(f32::NEG_INFINITY);
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for group in scores.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            maxima[i] = group[i].max(maxima[i]);
        }
    }
    let max = math::max(maxima);
    for group in scores.as_chunks_mut::<LANES>().0 {
        for i in 0..LANES {
            group[i] = math::exp(group[i] - max);
        }
    }
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let mut sums = [0.0; LANES];
    for group in scores.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            sums[i] += group[i];
        }
    }
    merge_sums(max, math::sum(sums), state_max, state_sum)
}

/// The positions that any of the queries sees.
#[inline(always)]
fn union(visible: &[Range<usize>]) -> Range<usize> {
    let seen = || visible.iter().filter(|range| !range.is_empty());
    seen().map(|range| range.start).min().unwrap_or(0)..seen().map(|range| range.end).max().unwrap_or(0)
}

/// The definition.
#[inline(always)]
pub fn attend(tile: &AttentionTile, q: &mut AttentionQueries) {
    let n = q.visible.len();
    let dim = q.queries.len() / n;
    let seen = union(q.visible);
    let at = |stored: &Stored, i: usize| match stored {
        Stored::F16(data) => f16_to_f32(data[i].to_le_bytes()),
        Stored::F32(data) => data[i],
    };
    for c in 0..n {
        if q.visible[c].is_empty() {
            continue;
        }
        let query = &q.queries[c * dim..][..dim];
        let scores = &mut q.scores[c];
        for g in seen.start / LANES..seen.end.div_ceil(LANES) {
            let mut sums: Lanes = [0.0; LANES];
            for d in 0..dim {
                for i in 0..LANES {
                    sums[i] = query[d].mul_add(at(&tile.keys, (g * dim + d) * LANES + i), sums[i]);
                }
            }
            scores[g * LANES..][..LANES].copy_from_slice(&sums);
        }
        let (old, new) = softmax(scores, &q.visible[c], tile.softcap, &mut q.max[c], &mut q.sum[c]);
        for d in 0..dim {
            let mut sum = 0.0;
            for p in seen.clone() {
                sum = scores[p].mul_add(at(&tile.values, p * dim + d), sum);
            }
            let out = &mut q.out[c * dim + d];
            *out = sum.mul_add(new, *out * old);
        }
    }
}

/// See `attend`, for a vector unit that takes as many as COLUMNS (at most 8) queries at a time.
///
/// # Safety
/// - The CPU has the unit's instruction set, and the caller is compiled for it.
#[inline(always)]
pub unsafe fn attend_simd<S: Simd, const COLUMNS: usize>(tile: &AttentionTile, q: &mut AttentionQueries) {
    let n = q.visible.len();
    let dim = q.queries.len() / n;
    assert!(q.queries.len() == n * dim && q.out.len() == n * dim);
    assert!(q.max.len() == n && q.sum.len() == n && q.scores.len() == n);
    if !dim.is_multiple_of(LANES) {
        return attend(tile, q);
    }
    match (tile.keys, tile.values) {
        (Stored::F16(keys), Stored::F16(values)) => {
            assert!(keys.len() >= TILE * dim && values.len() >= TILE * dim);
            attend_stored::<S, F16, COLUMNS>(tile, dim, q);
        }
        (Stored::F32(keys), Stored::F32(values)) => {
            assert!(keys.len() >= TILE * dim && values.len() >= TILE * dim);
            attend_stored::<S, F32, COLUMNS>(tile, dim, q);
        }
        _ => attend(tile, q),
    }
}

#[inline(always)]
unsafe fn attend_stored<S: Simd, P: Plain, const COLUMNS: usize>(
    tile: &AttentionTile,
    dim: usize,
    q: &mut AttentionQueries,
) {
    let n = q.visible.len();
    let mut first = 0;
    while first < n {
        let taken = (n - first).min(COLUMNS);
        let mut part = AttentionQueries {
            queries: &q.queries[first * dim..(first + taken) * dim],
            visible: &q.visible[first..first + taken],
            max: &mut q.max[first..first + taken],
            sum: &mut q.sum[first..first + taken],
            out: &mut q.out[first * dim..(first + taken) * dim],
            scores: &mut q.scores[first..first + taken],
        };
        macro_rules! by_number {
            ($($n:literal)*) => {
                match taken {
                    $($n => attend_columns::<S, P, $n>(tile, dim, &mut part),)*
                    _ => unreachable!("at most 8 queries at a time"),
                }
            };
        }
        by_number!(1 2 3 4 5 6 7 8);
        first += taken;
    }
}

/// `attend` for N queries.
#[inline(always)]
unsafe fn attend_columns<S: Simd, P: Plain, const N: usize>(
    tile: &AttentionTile,
    dim: usize,
    q: &mut AttentionQueries,
) {
    let (keys, values) = (tile.keys.address(), tile.values.address());
    // While keys are read the values are asked for, while these are read the next keys.
    let (next_values, next_keys) = match tile.next_keys {
        _ if !prefetch::is_on() => (None, None),
        Some(keys) => (Some(values), Some(keys.address())),
        None => (Some(values), Some(values)),
    };
    // Two groups of positions (and of elements) at a time, if there are registers for their sums.
    let in_pairs = N * 2 * (LANES / S::ROWS) <= S::REGISTERS / 2;
    let seen = union(q.visible);
    let mut g = seen.start / LANES;
    let end = seen.end.div_ceil(LANES);
    while in_pairs && g + 2 <= end {
        score::<S, P, N, 2>(keys, next_values, dim, q, g);
        g += 2;
    }
    while g < end {
        score::<S, P, N, 1>(keys, next_values, dim, q, g);
        g += 1;
    }
    let mut factors = [(1.0, 0.0); N];
    for c in 0..N {
        if !q.visible[c].is_empty() {
            factors[c] = softmax(&mut q.scores[c], &q.visible[c], tile.softcap, &mut q.max[c], &mut q.sum[c]);
        } else {
            q.scores[c] = [0.0; TILE];
        }
    }
    let mut d = 0;
    while in_pairs && d + 2 * LANES <= dim {
        add_values::<S, P, N, 2>(values, next_keys, dim, d, &seen, &factors, q);
        d += 2 * LANES;
    }
    while d < dim {
        add_values::<S, P, N, 1>(values, next_keys, dim, d, &seen, &factors, q);
        d += LANES;
    }
}

/// Elements of a head in one round of the innermost loop; divides LANES.
const UNROLLED: usize = 4;

/// Vectors of a group of LANES, at most.
const MAX_VECTORS: usize = 4;

/// Scores of GROUPS groups of positions, from group g on; asks for as much memory at `ahead` as it reads.
#[inline(always)]
unsafe fn score<S: Simd, P: Plain, const N: usize, const GROUPS: usize>(
    keys: *const u8,
    ahead: Option<*const u8>,
    dim: usize,
    q: &mut AttentionQueries,
    g: usize,
) {
    let offset = g * dim * LANES * P::BYTES;
    let keys = keys.add(offset);
    let mut queries = [q.queries.as_ptr(); N];
    for c in 0..N {
        queries[c] = queries[c].add(c * dim);
    }
    let mut sums = [[[S::splat(0.0); MAX_VECTORS]; GROUPS]; N];
    for d in (0..dim).step_by(UNROLLED) {
        if let Some(ahead) = ahead {
            let round = GROUPS * UNROLLED * LANES * P::BYTES;
            prefetch_lines(ahead.wrapping_add(offset + d / UNROLLED * round), round);
        }
        for d in d..d + UNROLLED {
            for group in 0..GROUPS {
                for v in 0..LANES / S::ROWS {
                    let key = P::load::<S>(keys.add(((group * dim + d) * LANES + v * S::ROWS) * P::BYTES));
                    for c in 0..N {
                        sums[c][group][v] = S::mul_add(S::splat(*queries[c].add(d)), key, sums[c][group][v]);
                    }
                }
            }
        }
    }
    for c in 0..N {
        let scores = q.scores[c][g * LANES..][..GROUPS * LANES].as_mut_ptr();
        for group in 0..GROUPS {
            for v in 0..LANES / S::ROWS {
                S::store(sums[c][group][v], scores.add(group * LANES + v * S::ROWS));
            }
        }
    }
}

/// Adds the weighted values of the positions `seen`, elements d and following of GROUPS * LANES; asks for as much memory
/// at `ahead` as it reads.
#[inline(always)]
unsafe fn add_values<S: Simd, P: Plain, const N: usize, const GROUPS: usize>(
    values: *const u8,
    ahead: Option<*const u8>,
    dim: usize,
    d: usize,
    seen: &Range<usize>,
    factors: &[Factors; N],
    q: &mut AttentionQueries,
) {
    let weights = q.scores.as_ptr();
    let mut sums = [[[S::splat(0.0); MAX_VECTORS]; GROUPS]; N];
    for p in seen.clone() {
        if let Some(ahead) = ahead {
            let round = GROUPS * LANES * P::BYTES;
            prefetch_lines(ahead.wrapping_add(d * TILE * P::BYTES + p * round), round);
        }
        for group in 0..GROUPS {
            for v in 0..LANES / S::ROWS {
                let value = P::load::<S>(values.add((p * dim + d + group * LANES + v * S::ROWS) * P::BYTES));
                for c in 0..N {
                    let weight = S::splat((*weights.add(c))[p]);
                    sums[c][group][v] = S::mul_add(weight, value, sums[c][group][v]);
                }
            }
        }
    }
    for c in (0..N).filter(|c| !q.visible[*c].is_empty()) {
        let (old, new) = (S::splat(factors[c].0), S::splat(factors[c].1));
        for group in 0..GROUPS {
            for v in 0..LANES / S::ROWS {
                let at = q.out[c * dim + d + group * LANES + v * S::ROWS..][..S::ROWS].as_mut_ptr();
                let kept = S::mul(S::from_f32(at.cast()), old);
                S::store(S::mul_add(sums[c][group][v], new, kept), at);
            }
        }
    }
}
