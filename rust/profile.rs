//! Where a forward's time goes, stage by stage, as seen by the thread that called it.

use crate::team::Crew;
use std::time::{Duration, Instant};

/// Part of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Embedding rows.
    Embed,
    /// Norms, quantising what they give, residual additions.
    Norms,
    /// Q, K, V and output projections.
    Projections,
    /// Head norms, RoPE, K/V writes, attention.
    Attention,
    /// Gate, up and down projections and the activation between them.
    Ffn,
    /// The output projection to the vocabulary.
    LmHead,
    /// What follows the logits.
    Sampling,
    /// Waiting for workers at the end of operations.
    Waiting,
    /// Entering and leaving the forward.
    Other,
}

const STAGES: [(Stage, &str); 9] = [
    (Stage::Embed, "embed"),
    (Stage::Norms, "norms"),
    (Stage::Projections, "projections"),
    (Stage::Attention, "attention"),
    (Stage::Ffn, "ffn"),
    (Stage::LmHead, "lm_head"),
    (Stage::Sampling, "sampling"),
    (Stage::Waiting, "waiting"),
    (Stage::Other, "other"),
];

/// A clock that is read at the end of each stage; off by default.
#[derive(Default)]
pub struct Profile {
    /// Time of each stage so far; None when profiling is off.
    stages: Option<[Duration; STAGES.len()]>,
    last: Option<Instant>,
    waited: Duration,
}

impl Profile {
    /// A profile that starts from zero, or none.
    pub fn new(on: bool) -> Self {
        Self { stages: on.then(Default::default), ..Self::default() }
    }

    /// Whether anything is measured.
    pub fn is_on(&self) -> bool {
        self.stages.is_some()
    }

    /// Begins a forward.
    pub fn start(&mut self) {
        self.last = self.is_on().then(Instant::now);
        self.waited = Duration::ZERO;
    }

    /// Ends a stage: the time since the last call is the stage's, less what the crew waited meanwhile.
    pub fn lap(&mut self, stage: Stage, crew: &Crew) {
        let (Some(stages), Some(last)) = (&mut self.stages, self.last) else { return };
        let (now, waited) = (Instant::now(), crew.waited());
        let waiting = waited.saturating_sub(self.waited);
        stages[Stage::Waiting as usize] += waiting;
        stages[stage as usize] += (now - last).saturating_sub(waiting);
        (self.last, self.waited) = (Some(now), waited);
    }

    /// Ends a forward; what follows the last stage belongs to no other.
    pub fn finish(&mut self) {
        if let (Some(stages), Some(last)) = (&mut self.stages, self.last.take()) {
            stages[Stage::Other as usize] += last.elapsed();
        }
    }

    /// Seconds of each stage.
    pub fn seconds(&self) -> Vec<(&'static str, f64)> {
        let stages = self.stages.unwrap_or_default();
        STAGES.iter().map(|(stage, name)| (*name, stages[*stage as usize].as_secs_f64())).collect()
    }
}
