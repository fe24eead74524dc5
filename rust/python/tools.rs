//! Kernels on arrays, and measurements: what needs no model.

use super::lock;
use crate::activations::Activations;
use crate::engine::Precision;
use crate::error::{Error, input_error};
use crate::kernels::{self, Apart, GROUP, N_APART, QUANT_BLOCK, QuantisedRow, SUM_BLOCK};
use crate::matmul::{Product, Then, matmul};
use crate::quant::{DType, blocks};
use crate::roofline;
use crate::team::{Team, thread_count};
use crate::weights::Weight;
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayDyn, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2,
    PyReadonlyArrayDyn, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use std::sync::Mutex;

#[pyfunction]
fn dequantize<'py>(
    py: Python<'py>,
    dtype: &str,
    data: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    let dtype = dtype_of(dtype)?;
    let data = data.as_slice()?;
    let (n, block, name) = (data.len(), dtype.block_bytes(), dtype.name());
    if !n.is_multiple_of(block) {
        return Err(input_error!("{n} bytes are not whole blocks of {name} ({block} bytes)").into());
    }
    let mut values = vec![0.0; n / block * dtype.block_len()];
    py.detach(|| blocks::decode(dtype, data, &mut values));
    Ok(values.into_pyarray(py))
}

/// A packed matrix with its own workers.
#[pyclass(frozen, module = "larql._core")]
struct Matrix {
    weight: Weight,
    fast: bool,
    team: Mutex<Team>,
}

#[pymethods]
impl Matrix {
    #[new]
    #[pyo3(signature = (dtype, data, columns, *, precision="fast", threads=1))]
    fn new(
        py: Python<'_>,
        dtype: &str,
        data: PyReadonlyArray2<'_, u8>,
        columns: usize,
        precision: &str,
        threads: usize,
    ) -> PyResult<Self> {
        let dtype = dtype_of(dtype)?;
        let fast = Precision::from_name(precision)? == Precision::Fast;
        let (rows, data) = (data.shape()[0], data.as_slice()?);
        let mut team = Team::new(thread_count(Some(threads))?)?;
        let weight = py.detach(|| team.enter(false, |crew| Weight::pack(crew, dtype, rows, columns, data)))?;
        Ok(Self { weight, fast, team: Mutex::new(team) })
    }

    #[getter]
    fn n_bytes(&self) -> usize {
        self.weight.n_bytes()
    }

    fn multiply<'py>(&self, py: Python<'py>, x: PyReadonlyArrayDyn<'py, f32>) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let (mut shape, x) = (x.shape().to_vec(), x.as_slice()?);
        let cols = self.weight.cols;
        if !(1..=2).contains(&shape.len()) || shape[shape.len() - 1] != cols {
            return Err(input_error!("x has shape {shape:?}; it must be [{cols}] or [n, {cols}]").into());
        }
        let mut out = Vec::new();
        py.detach(|| {
            let kernels = kernels::choose()?;
            lock(&self.team).enter(false, |crew| {
                let mut inputs = Activations::new(self.fast);
                inputs.fill(crew, kernels, x.len() / cols, cols, |i, row| row.copy_from_slice(&x[i * cols..][..cols]));
                matmul(
                    crew,
                    kernels,
                    &inputs,
                    &mut [Product { weight: &self.weight, then: Then::Store, out: &mut out }],
                );
                Ok(())
            })
        })?;
        *shape.last_mut().expect("checked above") = self.weight.rows;
        out.into_pyarray(py).reshape(shape)
    }
}

#[pyfunction]
fn rms_norm<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray1<'py, f32>,
    eps: f32,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (shape, x, weight) = ([x.shape()[0], x.shape()[1]], x.as_slice()?, weight.as_slice()?);
    if weight.len() != shape[1] {
        return Err(input_error!("x has rows of {}, and the weight has {} elements", shape[1], weight.len()).into());
    }
    let kernels = kernels::choose()?;
    let mut out = vec![0.0; x.len()];
    let width = shape[1].max(1);
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        (kernels.rms_norm)(x, weight, eps, out);
    }
    out.into_pyarray(py).reshape(shape)
}

#[pyfunction]
fn gate<'py>(
    py: Python<'py>,
    activation: &str,
    gate: PyReadonlyArray1<'py, f32>,
    x: PyReadonlyArray1<'py, f32>,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    let (gate, x) = (gate.as_slice()?, x.as_slice()?);
    if gate.len() != x.len() {
        return Err(input_error!("the gate has {} elements, and x has {}", gate.len(), x.len()).into());
    }
    let kernels = kernels::choose()?;
    let apply = match activation {
        "silu" => kernels.gate_silu,
        "gelu" => kernels.gate_gelu,
        _ => return Err(input_error!("activation is {activation:?}; it must be silu or gelu").into()),
    };
    let mut out = x.to_vec();
    apply(gate, &mut out);
    Ok(out.into_pyarray(py))
}

#[pyfunction]
fn softcap<'py>(py: Python<'py>, x: PyReadonlyArray1<'py, f32>, cap: f32) -> PyResult<Bound<'py, PyArray1<f32>>> {
    let mut out = x.as_slice()?.to_vec();
    (kernels::choose()?.softcap)(&mut out, cap);
    Ok(out.into_pyarray(py))
}

/// Quants, scales, and the places and values of the elements apart.
type QuantisedArrays<'py> =
    (Bound<'py, PyArray1<i8>>, Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

#[pyfunction]
fn quantize_activations<'py>(py: Python<'py>, x: PyReadonlyArray1<'py, f32>) -> PyResult<QuantisedArrays<'py>> {
    let x = x.as_slice()?;
    let stride = x.len().next_multiple_of(GROUP);
    let n_blocks = stride / QUANT_BLOCK;
    let mut quants = vec![0; stride];
    let mut scales = vec![0.0; n_blocks];
    let mut apart = [Apart::default(); N_APART];
    let mut row = QuantisedRow {
        quants: &mut quants,
        scales: &mut scales,
        sums: &mut vec![0.0; n_blocks],
        pair_sums: &mut vec![[0; 2]; stride / SUM_BLOCK],
        apart: &mut apart,
    };
    (kernels::choose()?.quantise)(x, &mut row);
    quants.truncate(x.len());
    scales.truncate(x.len().div_ceil(QUANT_BLOCK));
    Ok((
        quants.into_pyarray(py),
        scales.into_pyarray(py),
        PyArray1::from_iter(py, apart.iter().map(|apart| apart.index)),
        PyArray1::from_iter(py, apart.iter().map(|apart| apart.value)),
    ))
}

#[pyfunction]
fn default_threads() -> PyResult<usize> {
    Ok(thread_count(None)?)
}

#[pyfunction]
#[pyo3(signature = (buffer, *, threads, prefetch))]
fn measure_read(py: Python<'_>, buffer: PyReadonlyArray1<'_, u8>, threads: usize, prefetch: bool) -> PyResult<f64> {
    let buffer = buffer.as_slice()?;
    Ok(py.detach(|| roofline::read_seconds(buffer, threads, prefetch))?)
}

#[pyfunction]
#[pyo3(signature = (kind, *, threads))]
fn measure_peak(py: Python<'_>, kind: &str, threads: usize) -> PyResult<f64> {
    Ok(py.detach(|| roofline::peak(kind, threads))?)
}

/// An unknown type name is the caller's mistake here, not the model's.
fn dtype_of(name: &str) -> PyResult<DType> {
    Ok(DType::from_name(name).map_err(|e| Error::Input(e.to_string()))?)
}

/// Adds all of this to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Matrix>()?;
    m.add_function(wrap_pyfunction!(dequantize, m)?)?;
    m.add_function(wrap_pyfunction!(rms_norm, m)?)?;
    m.add_function(wrap_pyfunction!(gate, m)?)?;
    m.add_function(wrap_pyfunction!(softcap, m)?)?;
    m.add_function(wrap_pyfunction!(quantize_activations, m)?)?;
    m.add_function(wrap_pyfunction!(default_threads, m)?)?;
    m.add_function(wrap_pyfunction!(measure_read, m)?)?;
    m.add_function(wrap_pyfunction!(measure_peak, m)?)
}
