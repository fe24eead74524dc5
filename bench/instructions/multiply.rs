//! Multiplies a matrix by columns of activations, on one thread: what `count.py` counts the instructions of.
//!
//! ```text
//! usage: multiply TYPE ROWS COLS COLUMNS TIMES
//! ```

use larql::activations::Activations;
use larql::kernels;
use larql::matmul::{Product, Then, matmul};
use larql::quant::DType;
use larql::team::Team;
use larql::weights::Weight;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dtype, sizes @ ..] = &arguments[..] else { panic!("usage: multiply TYPE ROWS COLS COLUMNS TIMES") };
    let sizes: Vec<usize> = sizes.iter().map(|n| n.parse().expect("sizes are numbers")).collect();
    let [rows, cols, n, times] = sizes[..] else { panic!("usage: multiply TYPE ROWS COLS COLUMNS TIMES") };
    let dtype = DType::from_name(dtype).expect("a weight type");
    let kernels = kernels::choose().expect("an instruction set of this CPU");
    // Equal bytes are finite numbers in every type, and no kernel looks at what it multiplies.
    let bytes = vec![0x11; rows * dtype.row_bytes(cols).expect("whole blocks")];
    let x: Vec<f32> = (0..n * cols).map(|i| (i * 37 % 256) as f32 - 128.0).collect();
    let mut team = Team::new(1).expect("one thread");
    let outcome = team.enter(false, |crew| {
        let weight = Weight::pack(crew, dtype, rows, cols, &bytes)?;
        let (mut inputs, mut out) = (Activations::new(true), Vec::new());
        inputs.fill(crew, kernels, n, cols, |i, row| row.copy_from_slice(&x[i * cols..][..cols]));
        for _ in 0..times {
            let product = Product { weight: &weight, then: Then::Store, out: &mut out };
            matmul(crew, kernels, &inputs, &mut [product]);
        }
        Ok(out)
    });
    println!("{} {}", kernels.isa, outcome.expect("a product").iter().sum::<f32>());
}
