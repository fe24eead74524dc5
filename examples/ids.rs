//! Continues token ids with the most likely ones, without Python: the library alone, from a .vindex folder.
//!
//! ```text
//! usage: cargo run --release --example ids -- VINDEX N_NEW ID [ID ...]
//! ```
//!
//! Prints one line of JSON: the instruction set, the new ids, and for each the SHA-256 of the logits that it was chosen
//! from, as little-endian f32. Two machines that print the same ids and sums have computed the same bits.

use larql::batch::BatchItem;
use larql::config::ModelConfig;
use larql::engine::{Engine, EngineOptions, Precision};
use larql::kv_cache::Sequence;
use larql::sampler::{Sampler, SamplerConfig};
use larql::vindex::Vindex;
use larql::weights::Source;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

/// Of the .vindex format, as in python/larql/vindex.py.
const VERSION: u32 = 2;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(line) => println!("{line}"),
        Err(e) => {
            eprintln!("error: {e}");
            std::process::exit(1);
        }
    }
}

fn run(arguments: &[String]) -> Result<Value> {
    let [folder, n_new, prompt @ ..] = arguments else {
        return Err("usage: ids VINDEX N_NEW ID [ID ...]".into());
    };
    let n_new: usize = number(n_new)?;
    let prompt = prompt.iter().map(|id| number(id)).collect::<Result<Vec<u32>>>()?;
    if prompt.is_empty() {
        return Err("give at least one token id to continue".into());
    }
    let mut engine = open(Path::new(folder))?;
    let mut sequence = Sequence::new(engine.kv_layout().clone());
    let mut sampler = Sampler::new(SamplerConfig::default())?;
    let (mut ids, mut sums) = (Vec::new(), Vec::new());
    let mut new = prompt;
    for _ in 0..n_new {
        let logits = feed(&mut engine, &mut sequence, &new)?;
        sums.push(sha256(&logits));
        let best = sampler.sample(&logits)?;
        ids.push(best);
        new = vec![best];
    }
    Ok(json!({"isa": engine.isa(), "ids": ids, "logits_sha256": sums}))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number in range").into())
}

fn open(folder: &Path) -> Result<Engine> {
    let path = folder.join("index.json");
    let shown = path.display();
    let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {shown}: {e}"))?;
    let index: Value = serde_json::from_str(&text).map_err(|e| format!("{shown} is malformed: {e}"))?;
    if index["format"] != "larql-vindex" || index["version"] != VERSION {
        return Err(format!("{shown} is not a .vindex of version {VERSION}; convert the model again").into());
    }
    let config = ModelConfig::from_json(&index["config"].to_string())?;
    let weights = Vindex::open(&folder.join("weights.bin"), &index["tensors"].to_string())?;
    let options = EngineOptions { precision: Precision::Fast, threads: None, context: None };
    Ok(Engine::new(&Source::Vindex(Arc::new(weights)), config, options)?)
}

/// Feeds tokens; returns the logits after the last one, [vocab_size].
fn feed(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>> {
    let start = sequence.len();
    let item = |(i, token): (usize, &u32)| BatchItem {
        sequence: 0,
        position: start + i,
        token: *token,
        want_logits: i + 1 == tokens.len(),
    };
    let batch: Vec<BatchItem> = tokens.iter().enumerate().map(item).collect();
    Ok(engine.forward(&mut [sequence], &batch, &mut |_| Ok(()), Ok)?)
}

fn sha256(logits: &[f32]) -> String {
    let mut hash = Sha256::new();
    logits.iter().for_each(|logit| hash.update(logit.to_le_bytes()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
