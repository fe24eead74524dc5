//! The inner loops, one table of functions per instruction set, chosen once at run time.
//!
//! A table is portable source (`scalar`, `int8`, `attend`, `peaks`) compiled for one instruction set, and products and
//! attention written for its vectors (`simd`). All tables give the same bits. Kernels know blocks, rows and columns; they
//! know no model.

pub mod math;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod int8;
mod attend;
mod formats;
mod packed;
mod panel_block;
mod peaks;
mod plain;
mod prefetch;
mod scalar;
mod simd;
mod tiles;
#[cfg(test)]
mod tests;

pub use attend::{AttentionQueries, AttentionTile, Stored, TILE};
pub use int8::{
    Apart, COLUMN_TILE, GROUP, N_APART, QUANT_BLOCK, QuantisedRow, QuantisedRows, QuantisedTiles, SUM_BLOCK, interleave,
};
pub use math::LANES;
use math::Lanes;
pub use panel_block::Panels;
pub use peaks::READ_UNIT;
pub use prefetch::set_prefetch;

use crate::error::{Result, input_error};

/// Environment variable that forces an instruction set.
const ISA_VAR: &str = "LARQL_ISA";

/// Passes the list of kernels to a macro, after what is in the parentheses.
macro_rules! with_kernel_list {
    ($then:ident($($first:tt)*)) => {
        $then! {
            $($first)*
            /// `out` [panels, columns] = `w`, decoded to f32, times `x` [columns, w.cols].
            scalar fn matmul_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) -> ();
            /// The same with quantised weights and quantised columns, in integers block by block.
            scalar fn matmul_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) -> ();
            /// Quantises `x` to int8 with one scale per QUANT_BLOCK elements, the N_APART largest elements set apart.
            int8 fn quantise(x: &[f32], out: &mut QuantisedRow) -> ();
            /// `out` = `x` / sqrt(mean(x^2) + eps) * `weight` (Zhang and Sennrich, 2019).
            scalar fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> ();
            /// Turns pairs of a head and multiplies it by `scale`; `turns` are cosines, then sines (Su et al., 2021). Pair
            /// i is the elements i of both halves; those past the pairs are only scaled.
            scalar fn rotate_halves(head: &mut [f32], turns: &[f32], scale: f32) -> ();
            /// The same, pair i being the elements 2 i and 2 i + 1.
            scalar fn rotate_adjacent(head: &mut [f32], turns: &[f32], scale: f32) -> ();
            /// `x` *= silu(`gate`)
            scalar fn gate_silu(gate: &[f32], x: &mut [f32]) -> ();
            /// `x` *= gelu(`gate`), GELU by its tanh approximation.
            scalar fn gate_gelu(gate: &[f32], x: &mut [f32]) -> ();
            /// `x` = cap * tanh(`x` / cap)
            scalar fn softcap(x: &mut [f32], cap: f32) -> ();
            /// `x` += `y`
            scalar fn add(x: &mut [f32], y: &[f32]) -> ();
            /// Merges the attention of queries over one tile of keys into what they have.
            attend fn attend(tile: &AttentionTile, queries: &mut AttentionQueries) -> ();
            /// Merges the softmax over later positions into a query's own; outputs are [head_dim].
            attend fn merge_softmax(
                later_max: f32,
                later_sum: f32,
                later_out: &[f32],
                max: &mut f32,
                sum: &mut f32,
                out: &mut [f32]
            ) -> ();
            /// The sum of `bytes` as 64-bit words, READ_UNIT bytes at a time: a plain loop of loads.
            peaks fn read(bytes: &[u8]) -> u64;
            /// The same, asking for memory ahead of the loads.
            peaks fn read_prefetched(bytes: &[u8]) -> u64;
            /// Runs so many rounds of fused multiply-adds in registers; returns how many multiply-adds these were.
            peaks fn peak_f32(rounds: usize) -> usize;
            /// The same with 8-bit products summed in 16 bits.
            peaks fn peak_int8(rounds: usize) -> usize;
        }
    };
}

macro_rules! define_kernels {
    ($( $(#[$doc:meta])* $home:ident fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => {
        /// The kernels of one instruction set. Holding a reference proves that this CPU can run them.
        pub struct Kernels {
            /// Name of the instruction set.
            pub isa: &'static str,
            $( $(#[$doc])* pub $name: fn($($ty),*) -> $ret, )*
        }

        static SCALAR: Kernels = Kernels { isa: "scalar", $($name: $home::$name),* };
    };
}
with_kernel_list!(define_kernels());

/// Defines PORTABLE, a table of the portable kernels compiled for an instruction set. It may be used only where the
/// CPU has the features.
macro_rules! define_portable {
    ($isa:literal $features:literal $( $(#[$doc:meta])* $home:ident fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => {
        mod compiled {
            use super::*;
            $(
                #[target_feature(enable = $features)]
                pub fn $name($($arg: $ty),*) -> $ret { $home::$name($($arg),*) }
            )*
        }
        $(
            fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: tables of this module are handed out only after asking the CPU.
                unsafe { compiled::$name($($arg),*) }
            }
        )*
        const PORTABLE: Kernels = Kernels { isa: $isa, $($name),* };
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2_table {
    use super::*;

    with_kernel_list!(define_portable("avx2" "avx2,fma,f16c,bmi1,bmi2"));

    static TABLE: Kernels = Kernels {
        // SAFETY: as for the portable kernels.
        matmul_f32: |w, x, out| unsafe { avx2::matmul_f32(w, x, out) },
        // SAFETY: the same.
        matmul_int8: |w, x, out| unsafe { avx2::matmul_int8(w, x, out) },
        // SAFETY: the same.
        attend: |tile, queries| unsafe { avx2::attend(tile, queries) },
        // SAFETY: the same.
        peak_int8: |rounds| unsafe { peaks::peak_int8_avx2(rounds) },
        ..PORTABLE
    };

    pub fn table() -> Option<&'static Kernels> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2");
        has_all.then_some(&TABLE)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512_table {
    use super::*;

    with_kernel_list!(define_portable(
        "avx512vnni" "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2"
    ));

    static TABLE: Kernels = Kernels {
        // SAFETY: as for the portable kernels.
        matmul_f32: |w, x, out| unsafe { avx512::matmul_f32(w, x, out) },
        // SAFETY: the same.
        matmul_int8: |w, x, out| unsafe { avx512::matmul_int8(w, x, out) },
        // SAFETY: the same.
        attend: |tile, queries| unsafe { avx512::attend(tile, queries) },
        // SAFETY: the same.
        peak_f32: |rounds| unsafe { peaks::peak_f32_avx512(rounds) },
        // SAFETY: the same.
        peak_int8: |rounds| unsafe { peaks::peak_int8_vnni(rounds) },
        ..PORTABLE
    };

    pub fn table() -> Option<&'static Kernels> {
        let has_all = avx2_table::table().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        has_all.then_some(&TABLE)
    }
}

#[cfg(target_arch = "aarch64")]
mod neon_table {
    use super::*;

    with_kernel_list!(define_portable("neon" "neon"));

    const NEON: Kernels = Kernels {
        // SAFETY: as for the portable kernels.
        matmul_f32: |w, x, out| unsafe { neon::matmul_f32(w, x, out) },
        // SAFETY: the same.
        matmul_int8: |w, x, out| unsafe { neon::matmul_int8(w, x, out) },
        // SAFETY: the same.
        attend: |tile, queries| unsafe { neon::attend(tile, queries) },
        ..PORTABLE
    };
    static TABLE: Kernels = NEON;
    static DOT_TABLE: Kernels = Kernels {
        isa: "neon-dotprod",
        // SAFETY: the same.
        matmul_int8: |w, x, out| unsafe { neon::matmul_int8_dot(w, x, out) },
        // SAFETY: the same.
        peak_int8: |rounds| unsafe { peaks::peak_int8_dot(rounds) },
        ..NEON
    };

    pub fn tables() -> impl Iterator<Item = &'static Kernels> {
        [&TABLE].into_iter().chain(std::arch::is_aarch64_feature_detected!("dotprod").then_some(&DOT_TABLE))
    }
}

/// The tables that this CPU can run, slowest first.
pub fn available() -> Vec<&'static Kernels> {
    #[allow(unused_mut)] // where there is no other
    let mut tables = vec![&SCALAR];
    #[cfg(target_arch = "x86_64")]
    tables.extend([avx2_table::table(), avx512_table::table()].into_iter().flatten());
    #[cfg(target_arch = "aarch64")]
    tables.extend(neon_table::tables());
    tables
}

/// The fastest table of this CPU, or the one that `LARQL_ISA` names.
///
/// # Errors
/// `Error::Input` when the name is not one this CPU can run, or another variable of the kernels is wrong.
pub fn choose() -> Result<&'static Kernels> {
    prefetch::check()?;
    let tables = available();
    let Some(name) = std::env::var(ISA_VAR).ok().filter(|name| !name.is_empty()) else {
        return Ok(tables[tables.len() - 1]);
    };
    tables.iter().copied().find(|t| t.isa == name).ok_or_else(|| {
        let names: Vec<_> = tables.iter().map(|t| t.isa).collect();
        input_error!("{ISA_VAR} is {name:?}; this CPU can run: {}", names.join(" "))
    })
}
