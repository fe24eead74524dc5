//! The ladder's rungs, for `larql.ladder`.

use super::{Gguf, Watcher};
use crate::config::ModelConfig;
use crate::ladder::{self, Limits, Rung};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::time::Duration;

#[pyclass(frozen, module = "larql._core")]
struct Ladder(ladder::Ladder);

/// New ids, seconds of the prompt, seconds of each further token.
type Climbed = (Vec<u32>, f64, Vec<f64>);

#[pymethods]
impl Ladder {
    #[new]
    fn new(gguf: &Bound<'_, Gguf>, tensor_names: HashMap<String, String>, config_json: &str) -> PyResult<Self> {
        let config = ModelConfig::from_json(config_json)?;
        Ok(Self(ladder::Ladder::new(gguf.get().0.clone(), tensor_names, config)))
    }

    #[staticmethod]
    fn rungs() -> Vec<&'static str> {
        Rung::ALL.iter().map(|row| row.1).collect()
    }

    fn climb(
        &self,
        py: Python<'_>,
        rung: &str,
        prompt: Vec<u32>,
        tokens: usize,
        seconds: f64,
        threads: usize,
    ) -> PyResult<Climbed> {
        let rung = Rung::from_name(rung)?;
        let limits = Limits { tokens, time: Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX) };
        let mut watcher = Watcher::new();
        let outcome = py.detach(|| self.0.climb(rung, &prompt, limits, threads, &mut || watcher.look()));
        let climbed = watcher.or(outcome)?;
        let steps = climbed.steps.iter().map(Duration::as_secs_f64).collect();
        Ok((climbed.ids, climbed.prompt.as_secs_f64(), steps))
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Ladder>()
}
