//! What a forward is fed.

/// One token of a batch.
#[derive(Debug, Clone, Copy)]
pub struct BatchItem {
    /// Index into the batch's sequences.
    pub sequence: usize,
    /// Position in the sequence; positions continue what the sequence holds.
    pub position: usize,
    /// Row of the embedding.
    pub token: u32,
    /// Whether the logits after this token are computed.
    pub want_logits: bool,
}
