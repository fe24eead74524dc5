//! Weight formats: how many bytes hold how many weights, and what the bytes mean.

pub mod blocks;

use crate::error::{Result, model_error};

/// A storage type of weights, as GGUF files number and name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)] // the formats' own names
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// Facts of one type: (type, GGUF number, name, weights in a block, bytes of a block).
const TABLE: [(DType, u32, &str, usize, usize); 11] = [
    (DType::F32, 0, "F32", 1, 4),
    (DType::F16, 1, "F16", 1, 2),
    (DType::BF16, 30, "BF16", 1, 2),
    (DType::Q4_0, 2, "Q4_0", 32, 18),
    (DType::Q4_1, 3, "Q4_1", 32, 20),
    (DType::Q5_0, 6, "Q5_0", 32, 22),
    (DType::Q5_1, 7, "Q5_1", 32, 24),
    (DType::Q8_0, 8, "Q8_0", 32, 34),
    (DType::Q4_K, 12, "Q4_K", 256, 144),
    (DType::Q5_K, 13, "Q5_K", 256, 176),
    (DType::Q6_K, 14, "Q6_K", 256, 210),
];

impl DType {
    /// Every supported type.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type of a GGUF type number, if it is supported.
    pub fn from_gguf(number: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == number).map(|row| row.0)
    }

    /// The type of a name such as `Q4_K`.
    ///
    /// # Errors
    /// `Error::Model` lists the supported names.
    pub fn from_name(name: &str) -> Result<Self> {
        TABLE
            .iter()
            .find(|row| row.2 == name)
            .map(|row| row.0)
            .ok_or_else(|| model_error!("weight type {name} is not supported; supported are {}", Self::names()))
    }

    /// The supported names, for messages.
    pub fn names() -> String {
        TABLE.map(|row| row.2).join(" ")
    }

    /// The type's name.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Weights in one block.
    pub fn block_len(self) -> usize {
        self.row().3
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Whether weights are small integers with scales (all but F32, F16 and BF16).
    pub fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of one row of `cols` weights, or None when `cols` is not a whole number of blocks or overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block_len())
            .then(|| (cols / self.block_len()).checked_mul(self.block_bytes()))
            .flatten()
    }

    fn row(self) -> &'static (DType, u32, &'static str, usize, usize) {
        &TABLE[TABLE.iter().position(|row| row.0 == self).expect("TABLE lists every type")]
    }
}
