//! The Python module `larql._core`: only this module knows Python.
//!
//! Signatures and documentation for users are in `python/larql/_core.pyi`.

use crate::batch::BatchItem;
use crate::config::ModelConfig;
use crate::engine::{self, EngineOptions, Precision};
use crate::error::{Error, input_error};
use crate::gguf::{self, Array, Value};
use crate::kv_cache;
use crate::quant::blocks;
use crate::sampler::{self, SamplerConfig};
use crate::team::{Team, thread_count};
use crate::vindex;
use crate::weights::Source;
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayDyn, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2,
    PyUntypedArrayMethods,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

mod ladder;
mod tools;

/// How often a running forward looks for Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a process that was forked waits for a lock that may be held by a thread which was not.
const FORK_PATIENCE: Duration = Duration::from_secs(1);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let (class, text) = match &error {
            Error::Write(error) => return PyOSError::new_err(error.to_string()),
            Error::Model(text) => ("ModelError", text.clone()),
            Error::Input(text) => ("InputError", text.clone()),
            Error::Context { .. } => ("ContextError", error.to_string()),
            Error::Cancelled | Error::Internal(_) => ("LarqlError", error.to_string()),
        };
        Python::attach(|py| {
            let class = match py.import("larql.errors").and_then(|module| module.getattr(class)) {
                Ok(class) => class,
                Err(e) => return e,
            };
            let raised = match error {
                Error::Context { needed, limit } => class.call1((text, needed, limit)),
                _ => class.call1((text,)),
            };
            raised.map_or_else(|e| e, PyErr::from_value)
        })
    }
}

/// Locks; a panic elsewhere does not spoil the data, since forwards commit only at their end.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Looks for Ctrl-C while something runs without the GIL.
struct Watcher {
    next_look: Instant,
    interrupt: Option<PyErr>,
}

impl Watcher {
    fn new() -> Self {
        Self { next_look: Instant::now() + SIGNAL_INTERVAL, interrupt: None }
    }

    /// Looks, unless it has done so a moment ago; an error ends what runs.
    fn look(&mut self) -> crate::error::Result<()> {
        if Instant::now() >= self.next_look {
            self.next_look = Instant::now() + SIGNAL_INTERVAL;
            self.interrupt = Python::attach(|py| py.check_signals()).err();
        }
        if self.interrupt.is_some() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// The interrupt, or else the outcome.
    fn or<R>(self, outcome: crate::error::Result<R>) -> PyResult<R> {
        match self.interrupt {
            Some(error) => Err(error),
            None => Ok(outcome?),
        }
    }
}

#[pyclass(frozen, module = "larql._core")]
struct Gguf(Arc<gguf::Gguf>);

#[pymethods]
impl Gguf {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self(Arc::new(py.detach(|| gguf::Gguf::open(&path))?)))
    }

    #[getter]
    fn version(&self) -> u32 {
        self.0.version()
    }

    #[getter]
    fn paths(&self) -> Vec<OsString> {
        self.0.paths().iter().map(|path| path.clone().into_os_string()).collect()
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (key, value) in self.0.metadata() {
            dict.set_item(key, metadata_value(py, value)?)?;
        }
        Ok(dict)
    }

    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for info in self.0.tensors() {
            let shape = PyTuple::new(py, &info.shape)?;
            list.append((&info.name, info.dtype.name(), shape, self.0.bytes(info).len()))?;
        }
        Ok(list)
    }

    fn read_f32<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let info = self.0.tensor(name).ok_or_else(|| input_error!("the file has no tensor {name}"))?;
        let mut values = vec![0.0; info.shape.iter().product()];
        py.detach(|| blocks::decode(info.dtype, self.0.bytes(info), &mut values));
        values.into_pyarray(py).reshape(info.shape.as_slice())
    }
}

fn metadata_value<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::U8(v) => v.into_bound_py_any(py),
        Value::I8(v) => v.into_bound_py_any(py),
        Value::U16(v) => v.into_bound_py_any(py),
        Value::I16(v) => v.into_bound_py_any(py),
        Value::U32(v) => v.into_bound_py_any(py),
        Value::I32(v) => v.into_bound_py_any(py),
        Value::U64(v) => v.into_bound_py_any(py),
        Value::I64(v) => v.into_bound_py_any(py),
        Value::F32(v) => v.into_bound_py_any(py),
        Value::F64(v) => v.into_bound_py_any(py),
        Value::Bool(v) => v.into_bound_py_any(py),
        Value::String(v) => v.into_bound_py_any(py),
        Value::Array(array) => metadata_array(py, array),
    }
}

fn metadata_array<'py>(py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyAny>> {
    Ok(match array {
        Array::U8(v) => PyArray1::from_slice(py, v).into_any(),
        Array::I8(v) => PyArray1::from_slice(py, v).into_any(),
        Array::U16(v) => PyArray1::from_slice(py, v).into_any(),
        Array::I16(v) => PyArray1::from_slice(py, v).into_any(),
        Array::U32(v) => PyArray1::from_slice(py, v).into_any(),
        Array::I32(v) => PyArray1::from_slice(py, v).into_any(),
        Array::U64(v) => PyArray1::from_slice(py, v).into_any(),
        Array::I64(v) => PyArray1::from_slice(py, v).into_any(),
        Array::F32(v) => PyArray1::from_slice(py, v).into_any(),
        Array::F64(v) => PyArray1::from_slice(py, v).into_any(),
        Array::Bool(v) => PyArray1::from_slice(py, v).into_any(),
        Array::String(v) => PyList::new(py, v)?.into_any(),
        Array::Array(v) => {
            let list = PyList::empty(py);
            for inner in v {
                list.append(metadata_array(py, inner)?)?;
            }
            list.into_any()
        }
    })
}

#[pyclass(frozen, module = "larql._core")]
struct Vindex(Arc<vindex::Vindex>);

#[pymethods]
impl Vindex {
    #[new]
    fn new(path: PathBuf, table_json: &str) -> PyResult<Self> {
        Ok(Self(Arc::new(vindex::Vindex::open(&path, table_json)?)))
    }

    fn verify_against(&self, py: Python<'_>, gguf: &Bound<'_, Gguf>, tensor_names: TensorNames) -> PyResult<()> {
        let file = &gguf.get().0;
        py.detach(|| {
            let mut team = Team::new(thread_count(None)?)?;
            team.enter(false, |crew| self.0.verify_against(crew, file, &tensor_names.0))
        })?;
        Ok(())
    }
}

/// A dict of the engine's names to the source's names, in its own order.
struct TensorNames(Vec<(String, String)>);

impl<'py> FromPyObject<'_, 'py> for TensorNames {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object
            .cast::<PyDict>()?
            .iter()
            .map(|(name, source)| Ok((name.extract()?, source.extract()?)))
            .collect::<PyResult<_>>()
            .map(Self)
    }
}

/// Where an engine's weights come from.
#[derive(FromPyObject)]
enum PySource<'py> {
    Vindex(Bound<'py, Vindex>),
    Gguf((Bound<'py, Gguf>, HashMap<String, String>)),
}

#[pyfunction]
#[pyo3(signature = (gguf, tensor_names, path, progress=None))]
fn write_weights(
    py: Python<'_>,
    gguf: &Bound<'_, Gguf>,
    tensor_names: TensorNames,
    path: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let file = &gguf.get().0;
    let mut raised = None;
    let written = py.detach(|| {
        let mut report = |done: usize, total: usize| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (done, total)).map(drop))
            });
            told.map_err(|error| {
                raised = Some(error);
                Error::Cancelled
            })
        };
        let mut team = Team::new(thread_count(None)?)?;
        team.enter(false, |crew| vindex::write_weights(crew, file, &tensor_names.0, &path, &mut report))
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(serde_json::to_string(&written?).expect("plain data")),
    }
}

#[pyclass(frozen, module = "larql._core")]
struct Sequence(Mutex<kv_cache::Sequence>);

#[pymethods]
impl Sequence {
    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.0).len())
    }

    fn fork(&self, py: Python<'_>) -> Self {
        Self(Mutex::new(py.detach(|| lock(&self.0).clone())))
    }

    fn truncate(&self, py: Python<'_>, length: usize) -> PyResult<usize> {
        Ok(py.detach(|| lock(&self.0).truncate(length))?)
    }

    fn snapshot(&self, py: Python<'_>) {
        py.detach(|| lock(&self.0).snapshot());
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        py.detach(|| lock(&self.0).to_bytes()).into_pyarray(py)
    }
}

#[pyclass(frozen, module = "larql._core")]
struct Sampler(Mutex<sampler::Sampler>);

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (*, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=None, bias=None,
                        logprobs=false))]
    #[allow(clippy::too_many_arguments)] // keyword arguments of the Python class
    fn new(
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repeat_penalty: f32,
        seed: Option<u64>,
        bias: Option<HashMap<u32, f32>>,
        logprobs: bool,
    ) -> PyResult<Self> {
        let mut bias: Vec<(u32, f32)> = bias.unwrap_or_default().into_iter().collect();
        bias.sort_unstable_by_key(|(id, _)| *id);
        let config = SamplerConfig { temperature, top_k, top_p, min_p, repeat_penalty, seed, bias, logprobs };
        Ok(Self(Mutex::new(sampler::Sampler::new(config)?)))
    }

    fn observe(&self, ids: Vec<u32>) {
        lock(&self.0).observe(&ids);
    }

    fn sample(&self, logits: PyReadonlyArray1<'_, f32>) -> PyResult<u32> {
        Ok(lock(&self.0).sample(logits.as_slice()?)?)
    }

    #[getter]
    fn last_logprob(&self) -> Option<f32> {
        lock(&self.0).last_logprob()
    }
}

/// (sequence, position, token, want_logits) as Python gives it.
type PyItem<'py> = (Bound<'py, Sequence>, usize, u32, bool);

/// A batch with each of its sequences once.
struct Batch {
    sequences: Vec<Py<Sequence>>,
    items: Vec<BatchItem>,
}

impl Batch {
    fn new(items: Vec<PyItem<'_>>) -> Self {
        let mut sequences: Vec<Py<Sequence>> = Vec::new();
        let mut index = HashMap::new();
        let items = items
            .into_iter()
            .map(|(object, position, token, want_logits)| {
                let sequence = *index.entry(object.as_ptr() as usize).or_insert_with(|| {
                    sequences.push(object.unbind());
                    sequences.len() - 1
                });
                BatchItem { sequence, position, token, want_logits }
            })
            .collect();
        Self { sequences, items }
    }

    fn n_wanted(&self) -> usize {
        self.items.iter().filter(|item| item.want_logits).count()
    }
}

#[pyclass(frozen, module = "larql._core")]
struct Engine {
    /// None when it was closed.
    engine: Mutex<Option<engine::Engine>>,
    /// Where it was last used.
    process: AtomicU32,
    // Copies of what never changes, so that reading it does not wait for a forward.
    precision: Precision,
    threads: usize,
    isa: &'static str,
    context: usize,
    weight_bytes: usize,
    vocab_size: usize,
    trace_shape: (usize, usize),
    layout: Arc<kv_cache::KvLayout>,
}

impl Engine {
    /// Calls `f` with the engine, without the GIL.
    fn with<R: Send>(&self, py: Python<'_>, f: impl FnOnce(&mut engine::Engine) -> PyResult<R> + Send) -> PyResult<R> {
        py.detach(|| match self.lock()?.as_mut() {
            Some(engine) => f(engine),
            None => Err(input_error!("the model was closed").into()),
        })
    }

    /// Locks the engine. What held the lock when this process was forked from another is not here to let it go.
    fn lock(&self) -> PyResult<MutexGuard<'_, Option<engine::Engine>>> {
        let process = std::process::id();
        let deadline = Instant::now() + FORK_PATIENCE;
        while self.process.load(Ordering::Acquire) != process {
            match self.engine.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(SIGNAL_INTERVAL),
                Err(TryLockError::WouldBlock) => {
                    let error = input_error!(
                        "this process was forked while the model was computing, so it cannot be used here; \
                         open it again, or start processes with the method \"spawn\""
                    );
                    return Err(error.into());
                }
                _ => self.process.store(process, Ordering::Release),
            }
        }
        Ok(lock(&self.engine))
    }

    /// Runs a batch without the GIL, looking for Ctrl-C between layers; `finish` gets the logits. `tap` receives the residual stream [layers + 1, batch, hidden_size].
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        batch: &Batch,
        mut tap: Option<&mut Vec<f32>>,
        finish: impl FnOnce(Vec<f32>) -> crate::error::Result<R> + Send,
    ) -> PyResult<R> {
        self.with(py, |engine| {
            let mut guards: Vec<_> = batch.sequences.iter().map(|sequence| lock(&sequence.get().0)).collect();
            let mut sequences: Vec<_> = guards.iter_mut().map(|guard| &mut **guard).collect();
            let mut watcher = Watcher::new();
            let mut watch = |residual: &[f32]| {
                if let Some(tap) = &mut tap {
                    tap.extend_from_slice(residual);
                }
                watcher.look()
            };
            let outcome = engine.forward(&mut sequences, &batch.items, &mut watch, finish);
            watcher.or(outcome)
        })
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (weights, config_json, *, precision="fast", threads=None, context=None))]
    fn new(
        py: Python<'_>,
        weights: PySource<'_>,
        config_json: &str,
        precision: &str,
        threads: Option<usize>,
        context: Option<usize>,
    ) -> PyResult<Self> {
        let config = ModelConfig::from_json(config_json)?;
        let options = EngineOptions { precision: Precision::from_name(precision)?, threads, context };
        let source = match weights {
            PySource::Gguf((file, names)) => Source::Gguf(file.get().0.clone(), names),
            PySource::Vindex(file) => Source::Vindex(file.get().0.clone()),
        };
        let engine = py.detach(|| engine::Engine::new(&source, config, options))?;
        Ok(Self {
            precision: engine.precision(),
            threads: engine.n_threads(),
            isa: engine.isa(),
            context: engine.context(),
            weight_bytes: engine.weight_bytes(),
            vocab_size: engine.config().vocab_size,
            trace_shape: (engine.config().layers.len() + 1, engine.config().hidden_size),
            layout: engine.kv_layout().clone(),
            engine: Mutex::new(Some(engine)),
            process: AtomicU32::new(std::process::id()),
        })
    }

    #[getter]
    fn precision(&self) -> &'static str {
        self.precision.name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.threads
    }

    #[getter]
    fn isa(&self) -> &'static str {
        self.isa
    }

    #[getter]
    fn context(&self) -> usize {
        self.context
    }

    #[getter]
    fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn new_sequence(&self) -> Sequence {
        Sequence(Mutex::new(kv_cache::Sequence::new(self.layout.clone())))
    }

    fn sequence_from_bytes(
        &self,
        py: Python<'_>,
        length: usize,
        bytes: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<Sequence> {
        let bytes = bytes.as_slice()?;
        let sequence = py.detach(|| kv_cache::Sequence::from_bytes(self.layout.clone(), length, bytes))?;
        Ok(Sequence(Mutex::new(sequence)))
    }

    fn forward<'py>(&self, py: Python<'py>, batch: Vec<PyItem<'py>>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let batch = Batch::new(batch);
        let logits = self.run(py, &batch, None, Ok)?;
        logits.into_pyarray(py).reshape([batch.n_wanted(), self.vocab_size])
    }

    fn forward_sample<'py>(
        &self,
        py: Python<'py>,
        batch: Vec<PyItem<'py>>,
        samplers: Vec<Bound<'py, Sampler>>,
    ) -> PyResult<Vec<u32>> {
        let batch = Batch::new(batch);
        if samplers.len() != batch.n_wanted() {
            let (n, wanted) = (samplers.len(), batch.n_wanted());
            return Err(input_error!("{n} samplers for {wanted} rows of logits").into());
        }
        let samplers: Vec<Py<Sampler>> = samplers.into_iter().map(Bound::unbind).collect();
        self.run(py, &batch, None, |logits| {
            let rows = logits.chunks_exact(self.vocab_size);
            samplers.iter().zip(rows).map(|(sampler, row)| lock(&sampler.get().0).sample(row)).collect()
        })
    }

    fn unembed<'py>(&self, py: Python<'py>, states: PyReadonlyArray2<'py, f32>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (n, width) = (states.shape()[0], states.shape()[1]);
        if width != self.trace_shape.1 {
            return Err(
                input_error!("the states have {width} elements; this model's have {}", self.trace_shape.1).into()
            );
        }
        let states = states.as_slice()?;
        let logits = self.with(py, |engine| Ok(engine.unembed(states)?))?;
        logits.into_pyarray(py).reshape([n, self.vocab_size])
    }

    /// Frees the weights when what runs has come to its end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            drop(self.lock()?.take());
            Ok(())
        })
    }

    fn set_profiling(&self, py: Python<'_>, on: bool) -> PyResult<()> {
        self.with(py, |engine| {
            engine.set_profiling(on);
            Ok(())
        })
    }

    fn profile<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (stage, seconds) in self.with(py, |engine| Ok(engine.profile()))? {
            dict.set_item(stage, seconds)?;
        }
        Ok(dict)
    }

    #[allow(clippy::type_complexity)] // the two arrays of the Python signature
    fn trace<'py>(
        &self,
        py: Python<'py>,
        batch: Vec<PyItem<'py>>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, Bound<'py, PyArray3<f32>>)> {
        let batch = Batch::new(batch);
        let mut residuals = Vec::new();
        let logits = self.run(py, &batch, Some(&mut residuals), Ok)?;
        let (n_states, width) = self.trace_shape;
        Ok((
            logits.into_pyarray(py).reshape([batch.n_wanted(), self.vocab_size])?,
            residuals.into_pyarray(py).reshape([n_states, batch.items.len(), width])?,
        ))
    }
}

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("build_profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    m.add_class::<Gguf>()?;
    m.add_class::<Vindex>()?;
    m.add_class::<Sequence>()?;
    m.add_class::<Sampler>()?;
    m.add_class::<Engine>()?;
    m.add_function(wrap_pyfunction!(write_weights, m)?)?;
    ladder::register(m)?;
    tools::register(m)
}
