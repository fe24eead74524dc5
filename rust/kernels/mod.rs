//! The inner loops, one table of functions per instruction set, chosen once at run time.
//!
//! `scalar` holds the loops in portable Rust. Each table is that source compiled for one instruction set, so all
//! tables give the same bits. Kernels know blocks, rows and columns; they know no model.

pub mod math;
mod scalar;
#[cfg(test)]
mod tests;

pub use math::LANES;
use math::Lanes;
pub use scalar::{AttentionTile, GROUP, QUANT_BLOCK, QuantisedRow, QuantisedRows, SoftmaxState, TILE, WeightRows};

use crate::error::{Result, input_error};

/// Environment variable that forces an instruction set.
const ISA_VAR: &str = "LARQL_ISA";

macro_rules! kernel_tables {
    ($( $(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?); )*) => {
        /// The kernels of one instruction set. Holding a reference proves that this CPU can run them.
        pub struct Kernels {
            /// Name of the instruction set.
            pub isa: &'static str,
            $( $(#[$doc])* pub $name: fn($($ty),*), )*
        }

        static SCALAR: Kernels = Kernels { isa: "scalar", $($name: scalar::$name),* };

        /// x86-64 with AVX2, FMA and F16C: Intel since Haswell (2013), AMD since Zen (2017).
        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::*;

            mod compiled {
                use super::*;
                $(
                    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
                    pub fn $name($($arg: $ty),*) { scalar::$name($($arg),*) }
                )*
            }
            $(
                fn $name($($arg: $ty),*) {
                    // SAFETY: the table is only reachable through `table`, which has asked the CPU.
                    unsafe { compiled::$name($($arg),*) }
                }
            )*
            static TABLE: Kernels = Kernels { isa: "avx2", $($name),* };

            pub fn table() -> Option<&'static Kernels> {
                let has_all = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2");
                has_all.then_some(&TABLE)
            }
        }
    };
}

kernel_tables! {
    /// `out[c][r]` = row r of `w` (at most LANES rows, decoded to f32) times column c of `x` [columns, w.cols].
    fn matmul_f32(w: &WeightRows, x: &[f32], out: &mut [Lanes]);
    /// The same with quantised weights and quantised columns, in integers block by block.
    fn matmul_int8(w: &WeightRows, x: &QuantisedRows, out: &mut [Lanes]);
    /// Quantises `x` to int8 with one scale per QUANT_BLOCK elements.
    fn quantise(x: &[f32], out: &mut QuantisedRow);
    /// `out` = `x` / sqrt(mean(x^2) + eps) * `weight` (Zhang and Sennrich, 2019).
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
    /// `gate` = silu(`gate`) * `up`
    fn gate_silu(gate: &mut [f32], up: &[f32]);
    /// `gate` = gelu(`gate`) * `up`, GELU by its tanh approximation.
    fn gate_gelu(gate: &mut [f32], up: &[f32]);
    /// `x` = cap * tanh(`x` / cap)
    fn softcap(x: &mut [f32], cap: f32);
    /// `x` += `y`
    fn add(x: &mut [f32], y: &[f32]);
    /// Merges the attention of one query over one tile of keys into `state`.
    fn attend(tile: &AttentionTile, state: &mut SoftmaxState);
}

/// The tables that this CPU can run, slowest first.
pub fn available() -> Vec<&'static Kernels> {
    let mut tables = vec![&SCALAR];
    #[cfg(target_arch = "x86_64")]
    tables.extend(avx2::table());
    tables
}

/// The fastest table of this CPU, or the one that `LARQL_ISA` names.
///
/// # Errors
/// `Error::Input` when the name is not one this CPU can run.
pub fn choose() -> Result<&'static Kernels> {
    let tables = available();
    let Ok(name) = std::env::var(ISA_VAR) else {
        return Ok(tables[tables.len() - 1]);
    };
    tables.iter().copied().find(|t| t.isa == name).ok_or_else(|| {
        let names: Vec<_> = tables.iter().map(|t| t.isa).collect();
        input_error!("{ISA_VAR} is {name:?}; this CPU can run: {}", names.join(" "))
    })
}
