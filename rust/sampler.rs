//! From logits to a token: bias, repetition penalty, top-k, top-p, min-p, temperature, draw.
//!
//! The same logits, options and seed give the same token on every machine. Candidates are ordered by logit and, where
//! two are equal, by the lower id; probabilities come from one fixed polynomial; sums are f64 in a fixed order.
//!
//! A vocabulary can hold 262,144 tokens, so nothing sorts all of it. The passes over all logits (largest, weights,
//! sum, scan for candidates) have independent lanes and no branches per token, which the compiler turns into vector
//! code; only the candidates that a scan leaves are sorted.

use std::collections::VecDeque;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::{Error, Result, input_error};

/// How many of the latest tokens, prompt included, the repetition penalty looks at.
const PENALTY_WINDOW: usize = 64;

/// Tokens that a scan of the vocabulary looks at together.
const SCAN: usize = 32;

/// What a sampler does. The default is the most probable token.
#[derive(Debug, Clone)]
pub struct SamplerConfig {
    /// Divides the logits before the draw; 0 takes the most probable token, the lowest id if there are several.
    pub temperature: f32,
    /// Keeps this many of the most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most probable tokens that together have this probability, at least one; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this probable relative to the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of recent tokens and multiplies negative ones; 1 changes nothing.
    pub repeat_penalty: f32,
    /// Makes draws repeatable; None takes a seed from the operating system.
    pub seed: Option<u64>,
    /// (token, what is added to its logit); -inf bans the token.
    pub bias: Vec<(u32, f32)>,
    /// Whether `last_logprob` is wanted: one more pass over the vocabulary.
    pub logprobs: bool,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            seed: None,
            bias: Vec::new(),
            logprobs: false,
        }
    }
}

impl SamplerConfig {
    fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, repeat_penalty, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(input_error!("temperature must be 0 or a positive number, not {temperature}"));
        }
        for (name, value) in [("top_p", top_p), ("min_p", min_p)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(input_error!("{name} must be from 0 to 1, not {value}"));
            }
        }
        if !(repeat_penalty > 0.0 && repeat_penalty.is_finite()) {
            return Err(input_error!("repeat_penalty must be a positive number, not {repeat_penalty}"));
        }
        match self.bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            Some((id, bias)) => {
                Err(input_error!("the bias of token {id} must be a number, or -inf to ban it, not {bias}"))
            }
            None => Ok(()),
        }
    }

    /// Whether top-k, top-p or min-p can drop one of `n_tokens`.
    fn filters(&self, n_tokens: usize) -> bool {
        self.limits_count(n_tokens) || self.top_p < 1.0 || self.min_p > 0.0
    }

    fn limits_count(&self, n_tokens: usize) -> bool {
        self.top_k > 0 && self.top_k < n_tokens
    }
}

/// Chooses tokens for one sequence. Buffers are kept from call to call.
#[derive(Debug)]
pub struct Sampler {
    config: SamplerConfig,
    rng: ChaCha8Rng,
    /// The latest tokens, at most `PENALTY_WINDOW`.
    window: VecDeque<u32>,
    last_logprob: Option<f32>,
    /// Logits after bias and penalty [vocab], when there are any.
    edited: Vec<f32>,
    /// What the filters keep.
    candidates: Vec<Candidate>,
    /// Unnormalised probabilities of all tokens [vocab] or of the candidates.
    weights: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    logit: f32,
    id: u32,
}

impl Candidate {
    /// Ascends from the largest logit to the smallest and, where two are equal, from the lower id to the higher.
    #[inline(always)]
    fn rank(&self) -> u64 {
        // The bits of floats ascend like integers once the sign is undone; adding 0 makes -0 equal to 0.
        let bits = (self.logit + 0.0).to_bits();
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        u64::from(!ascending) << 32 | u64::from(self.id)
    }
}

impl Sampler {
    /// A sampler that has seen no token.
    ///
    /// # Errors
    /// `Error::Input` names an option that is out of its range.
    pub fn new(config: SamplerConfig) -> Result<Self> {
        config.check()?;
        let rng = match config.seed {
            Some(seed) => ChaCha8Rng::seed_from_u64(seed),
            None => ChaCha8Rng::try_from_os_rng()
                .map_err(|error| Error::Internal(format!("no random seed from the operating system: {error}")))?,
        };
        Ok(Self {
            config,
            rng,
            window: VecDeque::with_capacity(PENALTY_WINDOW),
            last_logprob: None,
            edited: Vec::new(),
            candidates: Vec::new(),
            weights: Vec::new(),
        })
    }

    /// Adds tokens to those that the repetition penalty looks at. Sampled tokens are added by themselves.
    pub fn observe(&mut self, ids: &[u32]) {
        for &id in &ids[ids.len().saturating_sub(PENALTY_WINDOW)..] {
            if self.window.len() == PENALTY_WINDOW {
                self.window.pop_front();
            }
            self.window.push_back(id);
        }
    }

    /// The next token for one row of logits [vocab].
    ///
    /// # Errors
    /// `Error::Input` when a biased or observed token is not in the vocabulary or every token is banned,
    /// `Error::Internal` when a logit is NaN or +inf. The sampler is then as it was.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let Self { config, rng, window, edited, candidates, weights, .. } = self;
        let edited = edit(logits, config, window, edited)?;
        let max = largest(edited)?;
        let token = if config.temperature == 0.0 {
            first_at(edited, max)
        } else if config.filters(edited.len()) {
            filter(edited, max, config, candidates, weights);
            let index = draw(candidates.iter().map(|c| c.logit), max, config.temperature, weights, rng);
            candidates[index].id
        } else {
            draw(edited.iter().copied(), max, config.temperature, weights, rng) as u32
        };
        self.last_logprob = if self.config.logprobs { Some(self.log_probability(logits, token)?) } else { None };
        self.observe(&[token]);
        Ok(token)
    }

    /// Natural log of the model's own probability (no bias, penalty, filter or temperature) of the last sampled token,
    /// when the configuration asks for it.
    pub fn last_logprob(&self) -> Option<f32> {
        self.last_logprob
    }

    fn log_probability(&mut self, logits: &[f32], token: u32) -> Result<f32> {
        let max = largest(logits)?;
        let total = weigh(logits.iter().copied(), max, 1.0, &mut self.weights);
        Ok((f64::from(logits[token as usize]) - f64::from(max) - libm::log(total)) as f32)
    }
}

/// Applies bias and repetition penalty, in `buffer` if there are any.
fn edit<'a>(
    logits: &'a [f32],
    config: &SamplerConfig,
    window: &VecDeque<u32>,
    buffer: &'a mut Vec<f32>,
) -> Result<&'a [f32]> {
    let penalty = config.repeat_penalty;
    if config.bias.is_empty() && (penalty == 1.0 || window.is_empty()) {
        return Ok(logits);
    }
    buffer.clear();
    buffer.extend_from_slice(logits);
    for &(id, bias) in &config.bias {
        change(buffer, id, "biased", |logit| logit + bias)?;
    }
    if penalty != 1.0 {
        for (i, &id) in window.iter().enumerate() {
            if !window.iter().take(i).any(|&earlier| earlier == id) {
                change(buffer, id, "observed", |logit| if logit > 0.0 { logit / penalty } else { logit * penalty })?;
            }
        }
    }
    Ok(buffer)
}

fn change(logits: &mut [f32], id: u32, role: &str, new: impl Fn(f32) -> f32) -> Result<()> {
    let n_tokens = logits.len();
    let logit = logits.get_mut(id as usize);
    let logit = logit.ok_or_else(|| input_error!("the {role} token {id} is not in the vocabulary of {n_tokens}"))?;
    // NaN and infinity stay for `largest` to report; the overflow of a huge option is not that.
    if *logit < f32::INFINITY {
        *logit = new(*logit).min(f32::MAX);
    }
    Ok(())
}

/// The largest logit, which is finite.
fn largest(logits: &[f32]) -> Result<f32> {
    let mut lanes = [f32::NEG_INFINITY; SCAN];
    let mut all_valid = true;
    let (chunks, rest) = logits.as_chunks::<SCAN>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            all_valid &= logit < f32::INFINITY;
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    all_valid &= rest.iter().all(|&logit| logit < f32::INFINITY);
    if !all_valid {
        return Err(Error::Internal("a logit is NaN or infinite".into()));
    }
    let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(input_error!("no token is left to choose: each of the {} logits is -inf", logits.len()));
    }
    Ok(max)
}

/// The lowest id whose logit is `max`.
fn first_at(logits: &[f32], max: f32) -> u32 {
    let start = logits.chunks(SCAN).position(|chunk| any(chunk, |logit| logit == max)).expect("max is a logit") * SCAN;
    (start..).zip(&logits[start..]).find(|(_, logit)| **logit == max).expect("the chunk holds it").0 as u32
}

/// Whether the condition holds for one logit at least; evaluates all, without branches.
#[inline(always)]
fn any(chunk: &[f32], condition: impl Fn(f32) -> bool) -> bool {
    chunk.iter().fold(false, |found, &logit| found | condition(logit))
}

/// Fills `candidates` with what top-k, top-p and min-p keep.
fn filter(logits: &[f32], max: f32, config: &SamplerConfig, candidates: &mut Vec<Candidate>, weights: &mut Vec<f32>) {
    // Each filter cuts the end off the same order, so min-p may come before top-p once the total for top-p is known.
    let (top_p, min_p) = (f64::from(config.top_p), config.min_p);
    candidates.clear();
    let total = if config.limits_count(logits.len()) {
        keep_top_k(logits, config.top_k, candidates);
        let total = weigh(candidates.iter().map(|c| c.logit), max, 1.0, weights);
        candidates.retain(|c| exp(c.logit - max) >= min_p);
        total
    } else {
        let total = weigh(logits.iter().copied(), max, 1.0, weights);
        // Top-p drops every token below this: all such tokens together have less than 1 - top_p. (n - 1 would do for n;
        // the difference covers rounding.)
        let floor = (1.0 - top_p) * total / logits.len() as f64;
        collect_above(weights, logits, min_p.max(floor as f32), candidates);
        total
    };
    if top_p < 1.0 {
        keep_top_p(candidates, max, top_p * total);
    }
}

/// Fills `candidates` with the `top_k` most probable tokens in order. Banned tokens are not among them.
fn keep_top_k(logits: &[f32], top_k: usize, candidates: &mut Vec<Candidate>) {
    // What is not above the k-th best so far cannot be among the best: on a tie the lower id, seen earlier, wins.
    let mut threshold = f32::NEG_INFINITY;
    let capacity = 2 * top_k + SCAN;
    for (chunk, first_id) in logits.chunks(SCAN).zip((0..).step_by(SCAN)) {
        if !any(chunk, |logit| logit > threshold) {
            continue;
        }
        let above = (first_id..).zip(chunk).filter(|(_, logit)| **logit > threshold);
        candidates.extend(above.map(|(id, &logit)| Candidate { logit, id }));
        if candidates.len() >= capacity {
            candidates.select_nth_unstable_by_key(top_k - 1, Candidate::rank);
            candidates.truncate(top_k);
            threshold = candidates[top_k - 1].logit;
        }
    }
    candidates.sort_unstable_by_key(Candidate::rank);
    candidates.truncate(top_k);
}

/// Fills `candidates` with the tokens whose weight is at least `floor`, by id.
fn collect_above(weights: &[f32], logits: &[f32], floor: f32, candidates: &mut Vec<Candidate>) {
    for (chunk, first_id) in weights.chunks(SCAN).zip((0..).step_by(SCAN)) {
        if any(chunk, |weight| weight >= floor) {
            let above = (first_id..).zip(chunk).filter(|(_, weight)| **weight >= floor);
            candidates.extend(above.map(|(id, _)| Candidate { logit: logits[id as usize], id }));
        }
    }
}

/// Keeps the fewest most probable candidates whose weights reach `target`, in the order they are in.
///
/// A flat distribution has 100,000 of them, so they are not sorted: their weights are summed by distance from the
/// largest logit, and only the bucket in which the sum reaches the target is looked at one by one.
fn keep_top_p(candidates: &mut Vec<Candidate>, max: f32, target: f64) {
    const BUCKETS_PER_NAT: f32 = 32.0;
    const N_BUCKETS: usize = 88 * BUCKETS_PER_NAT as usize; // weights from 87 on are 0
    let bucket = |c: &Candidate| (((max - c.logit) * BUCKETS_PER_NAT) as usize).min(N_BUCKETS - 1);
    let weight = |c: &Candidate| f64::from(exp(c.logit - max));

    let mut sums = [0.0; N_BUCKETS];
    for candidate in candidates.iter() {
        sums[bucket(candidate)] += weight(candidate);
    }
    let mut sum = 0.0;
    let Some(last_bucket) = sums.iter().position(|bucket_sum| {
        let reached = sum + bucket_sum >= target;
        sum += if reached { 0.0 } else { *bucket_sum };
        reached
    }) else {
        return; // rounding: all are needed
    };
    let mut last_few: Vec<_> = candidates.iter().copied().filter(|c| bucket(c) == last_bucket).collect();
    last_few.sort_unstable_by_key(Candidate::rank);
    let last = last_few.iter().find(|c| {
        sum += weight(c);
        sum >= target
    });
    if let Some(last) = last.or(last_few.last()) {
        let last_rank = last.rank();
        candidates.retain(|c| c.rank() <= last_rank);
    }
}

/// An index drawn with the probabilities of the softmax of `logits` / `temperature`.
fn draw(
    logits: impl ExactSizeIterator<Item = f32>,
    max: f32,
    temperature: f32,
    weights: &mut Vec<f32>,
    rng: &mut ChaCha8Rng,
) -> usize {
    let total = weigh(logits, max, temperature, weights);
    let unit = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let mut left = unit * total;
    for (i, &weight) in weights.iter().enumerate() {
        left -= f64::from(weight);
        if left < 0.0 {
            return i;
        }
    }
    // Rounding took the sum past the last token that has any probability.
    weights.iter().rposition(|&weight| weight > 0.0).expect("the largest logit has weight 1")
}

/// Fills `weights` with exp((logit - max) / temperature) and returns their sum.
fn weigh(logits: impl ExactSizeIterator<Item = f32>, max: f32, temperature: f32, weights: &mut Vec<f32>) -> f64 {
    weights.clear();
    weights.extend(logits.map(|logit| exp((logit - max) / temperature)));
    let mut lanes = [0.0; 8];
    let (chunks, rest) = weights.as_chunks::<8>();
    for chunk in chunks {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().copied().map(f64::from).sum::<f64>()
}

/// e to the power of x <= 0, within 1e-7 of the true value (relative); 0 below -87, where f32 becomes subnormal.
///
/// x = k ln 2 + r, and e^x = 2^k e^r by the Taylor polynomial of degree 7, whose error at |r| <= ln 2 / 2 is 6e-9. Plain
/// arithmetic in a fixed order has the same bits everywhere, and it vectorises: a pass over 262,144 logits took a fifth
/// of the time of the `libm` crate. `kernels::math::exp` fuses multiply-adds, which is slow where no kernel is compiled
/// for the CPU, and never gives 0.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which is then in the low bits: 1.5 * 2^23.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first short enough for its multiples to be exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let k = rounded - ROUND;
    let r = x - k * LN_2[0] - k * LN_2[1];
    let power = TAYLOR.iter().fold(1.0 / 5040.0, |sum, coefficient| sum * r + coefficient);
    let two_to_k = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1f32.to_bits()));
    if x < -87.0 { 0.0 } else { power * two_to_k }
}

#[cfg(test)]
mod tests;
