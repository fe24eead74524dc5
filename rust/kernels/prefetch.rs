//! How far ahead of its use memory is asked for.

use crate::error::{Result, input_error};
use std::sync::LazyLock;

/// Environment variable with another distance, in bytes; 0 leaves it to the CPU.
const DISTANCE_VAR: &str = "LARQL_PREFETCH";
/// Longest distance: much more than any CPU's caches would keep until it is used.
const MAX_DISTANCE: usize = 1 << 20;
/// Measured: see bench/baselines/cpu/DIAGNOSIS-04-roofline.md.
const DEFAULT_DISTANCE: usize = 8192;

static DISTANCE: LazyLock<std::result::Result<usize, String>> = LazyLock::new(|| {
    let Ok(text) = std::env::var(DISTANCE_VAR) else {
        return Ok(DEFAULT_DISTANCE);
    };
    let distance = text.trim().parse().ok().filter(|distance| *distance <= MAX_DISTANCE);
    distance.ok_or_else(|| format!("{DISTANCE_VAR} is {text:?}; it must be a number of bytes, at most {MAX_DISTANCE}"))
});

/// The distance in bytes.
#[inline]
pub fn distance() -> usize {
    *DISTANCE.as_ref().unwrap_or(&DEFAULT_DISTANCE)
}

/// Checks the environment.
///
/// # Errors
/// `Error::Input` when the variable is not a distance.
pub fn check() -> Result<()> {
    DISTANCE.as_ref().map(|_| ()).map_err(|text| input_error!("{text}"))
}
