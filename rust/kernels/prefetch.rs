//! Asking for memory ahead of its use, and how far.

use crate::error::{Result, input_error};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Environment variable with another distance, in bytes; 0 leaves it to the CPU.
const DISTANCE_VAR: &str = "LARQL_PREFETCH";
/// Longest distance: much more than any CPU's caches would keep until it is used.
const MAX_DISTANCE: usize = 1 << 20;
/// x86-64: measured, see bench/baselines/cpu/DIAGNOSIS-04-roofline.md. ARM is not measured yet; the public LARQL lost
/// speed by it on an M3.
const DEFAULT_DISTANCE: usize = if cfg!(target_arch = "aarch64") { 0 } else { 8192 };

static DISTANCE: LazyLock<std::result::Result<usize, String>> = LazyLock::new(|| {
    let Some(text) = std::env::var(DISTANCE_VAR).ok().filter(|text| !text.is_empty()) else {
        return Ok(DEFAULT_DISTANCE);
    };
    let distance = text.trim().parse().ok().filter(|distance| *distance <= MAX_DISTANCE);
    distance.ok_or_else(|| format!("{DISTANCE_VAR} is {text:?}; it must be a number of bytes, at most {MAX_DISTANCE}"))
});

static OFF: AtomicBool = AtomicBool::new(false);

/// Turns prefetching off for the whole process, or on again.
pub fn set_prefetch(on: bool) {
    OFF.store(!on, Ordering::Relaxed);
}

/// The distance in bytes.
#[inline]
pub fn distance() -> usize {
    if OFF.load(Ordering::Relaxed) {
        return 0;
    }
    *DISTANCE.as_ref().unwrap_or(&DEFAULT_DISTANCE)
}

/// Whether kernels shall ask for memory. They always do on x86-64, at a distance of 0 for what they read just then: a
/// branch in their loops costs up to 7 % (bench/baselines/cpu/DIAGNOSIS-08-neon.md).
#[inline]
pub fn is_on() -> bool {
    cfg!(target_arch = "x86_64") || distance() > 0
}

/// Checks the environment.
///
/// # Errors
/// `Error::Input` when the variable is not a distance.
pub fn check() -> Result<()> {
    DISTANCE.as_ref().map(|_| ()).map_err(|text| input_error!("{text}"))
}

/// Asks for the cache lines of some bytes, which may lie outside any object. A core can wait for few lines at once, so a
/// kernel asks for a sub-block's share at a time.
#[inline(always)]
pub fn prefetch_lines(at: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        prefetch(at.wrapping_add(64 * line));
    }
}

/// Asks for the cache line at `address`, which may lie outside any object; does nothing where there is no such
/// instruction.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE belongs to x86-64, and a prefetch of any address has no effect that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch of any address has no effect that a program can see.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
