//! The one error type of the crate. Each variant becomes one Python exception.

/// What went wrong, by whose fault it is.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model file, or its metadata, cannot be used.
    #[error("{0}")]
    Model(String),
    /// A file cannot be written.
    #[error("{0}")]
    Write(std::io::Error),
    /// The caller's arguments do not make sense.
    #[error("{0}")]
    Input(String),
    /// A sequence would grow past the context length.
    #[error("the context holds {limit} tokens, and {needed} are needed: shorten the text or raise the context length")]
    Context {
        /// Tokens that the sequence would hold.
        needed: usize,
        /// Tokens that a sequence may hold.
        limit: usize,
    },
    /// The caller asked for the work to stop.
    #[error("cancelled")]
    Cancelled,
    /// A bug in LARQL: a worker panicked.
    #[error("internal error (please report it): {0}")]
    Internal(String),
}

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

/// Shorthand for `Error::Model(format!(..))`.
macro_rules! model_error {
    ($($arg:tt)*) => { $crate::error::Error::Model(format!($($arg)*)) };
}

/// Shorthand for `Error::Input(format!(..))`.
macro_rules! input_error {
    ($($arg:tt)*) => { $crate::error::Error::Input(format!($($arg)*)) };
}

pub(crate) use {input_error, model_error};
