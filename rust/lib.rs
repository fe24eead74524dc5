//! The LARQL engine: runs quantised transformer language models on ordinary CPUs.
//!
//! One token's way: Python calls [`engine::Engine::forward`] with a batch of one item. [`model::Forward`] takes the
//! token's embedding row, and for each layer normalises it, multiplies it by the projections ([`matmul`]), turns
//! queries and keys ([`ops`]), stores keys and values ([`kv_cache`]), attends ([`attention`]) and adds the results to
//! the residual stream. The head gives logits, from which [`sampler`] picks the next token. Work is spread over
//! threads by [`team`]; inner loops are in [`kernels`], chosen for the CPU at run time. Weights come from a file
//! ([`gguf`], [`vindex`]) and stay quantised ([`quant`]), their bytes in the order that kernels want ([`pack`]).
//!
//! Modules are listed in reading order.

pub mod engine;
pub mod model;
pub mod attention;
pub mod kv_cache;
pub mod batch;
pub mod ops;
pub mod matmul;
pub mod activations;
pub mod sampler;
pub mod weights;
pub mod vindex;
pub mod gguf;
pub mod mapped;
pub mod memory;
pub mod profile;
pub mod roofline;
pub mod team;
pub mod cores;
pub mod kernels;
pub mod pack;
pub mod quant;
pub mod config;
pub mod error;
pub mod ladder;
#[cfg(feature = "python")]
mod python;
