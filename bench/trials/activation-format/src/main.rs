//! A trial that decides the activation format and the panel height by measurement; README.md says what and why.
//!
//! usage: cargo run --release -- [--json OUT.json] [--mib N] [--rounds N] [--check]

mod activations;
mod bench;
mod panels;
mod simd;
mod weights;

use activations::{
    Columns, Form, GROUP, Plain16, Plain32, Plain32Apart, TwoLevel16, TwoLevel32, TwoLevel32Apart, Whole, quantise,
};
use panels::Panels;
use simd::{broadcast_f32, multiply_add, store_f32, zero_f32};
use std::array::from_fn;
use std::iter::zip;
use weights::{Q4K, Q6K, Q8_0, TILE_COLUMNS, Totals, Weights};

/// Times a vector: the rows of one panel for each panel.
type Matvec<T, const O: usize> = fn(&[<T as Weights>::Packed<O>], &Columns<1>, &mut [[[f32; 8]; O]], usize);
/// Times many columns, TILE_COLUMNS at a time: [panel][tile] results.
type Matmul<T, const O: usize> = fn(&[<T as Weights>::Packed<O>], &[Columns<TILE_COLUMNS>], &mut [TileOut<O>]);
/// [octet][column][row]
type TileOut<const O: usize> = [[[f32; 8]; TILE_COLUMNS]; O];

/// What the trial compares, for one weight format and panel height.
struct Variant<T: Weights, const O: usize> {
    form: &'static str,
    matvec: Matvec<T, O>,
    matmul: Matmul<T, O>,
    quantise: fn([&[f32]; 1]) -> Columns<1>,
    quantise_tile: fn([&[f32]; TILE_COLUMNS]) -> Columns<TILE_COLUMNS>,
    decode: fn(&Columns<1>) -> Vec<f64>,
}

fn variant<T: Weights, F: Form, const O: usize>() -> Variant<T, O> {
    Variant {
        form: F::NAME,
        matvec: matvec::<T, F, O>,
        matmul: matmul::<T, F, O>,
        quantise: quantise::<F, 1>,
        quantise_tile: quantise::<F, TILE_COLUMNS>,
        decode: Columns::decode::<F>,
    }
}

fn variants<T: Weights, const O: usize>() -> [Variant<T, O>; 7] {
    [
        variant::<T, Whole, O>(),
        variant::<T, Plain32, O>(),
        variant::<T, TwoLevel32, O>(),
        variant::<T, Plain16, O>(),
        variant::<T, TwoLevel16, O>(),
        variant::<T, Plain32Apart, O>(),
        variant::<T, TwoLevel32Apart, O>(),
    ]
}

/// out = w * x, asking for memory `distance` bytes ahead if that is not 0.
#[inline(never)]
fn matvec<T: Weights, F: Form, const O: usize>(
    w: &[T::Packed<O>],
    x: &Columns<1>,
    out: &mut [[[f32; 8]; O]],
    distance: usize,
) {
    let eighth = size_of::<T::Packed<O>>() / 8;
    for (panel, out) in zip(w.chunks_exact(x.groups.len()), out) {
        let mut totals = [[zero_f32(); 1]; O];
        for (w, x) in zip(panel, &x.groups) {
            let ahead = std::ptr::from_ref(w).cast::<u8>().wrapping_add(distance);
            T::multiply_packed::<F, O>(w, x, &mut totals, |i| {
                if distance != 0 {
                    for line in 0..eighth.div_ceil(64) {
                        simd::prefetch(ahead.wrapping_add(i * eighth + 64 * line));
                    }
                }
            });
        }
        add_apart::<T, F, O, 1>(panel, x, &mut totals);
        for (out, [total]) in zip(out, totals) {
            store_f32(out, total);
        }
    }
}

/// out = w * x for all tiles of x, every panel unpacked once.
#[inline(never)]
fn matmul<T: Weights, F: Form, const O: usize>(
    w: &[T::Packed<O>],
    x: &[Columns<TILE_COLUMNS>],
    out: &mut [TileOut<O>],
) {
    let mut unpacked = Vec::new();
    for (panel, out) in zip(w.chunks_exact(x[0].groups.len()), out.chunks_exact_mut(x.len())) {
        unpacked.clear();
        unpacked.extend(panel.iter().map(T::unpack));
        for (x, out) in zip(x, out) {
            let mut totals = [[zero_f32(); TILE_COLUMNS]; O];
            for (w, x) in zip(&unpacked, &x.groups) {
                T::multiply_tile::<F, O>(w, x, &mut totals);
            }
            add_apart::<T, F, O, TILE_COLUMNS>(panel, x, &mut totals);
            for (out, total) in zip(out.as_flattened_mut(), totals.as_flattened()) {
                store_f32(out, *total);
            }
        }
    }
}

/// totals += w * the elements of x that are apart.
#[inline(always)]
fn add_apart<T: Weights, F: Form, const O: usize, const N: usize>(
    panel: &[T::Packed<O>],
    x: &Columns<N>,
    totals: &mut Totals<O, N>,
) {
    if F::APART == 0 {
        return;
    }
    for (c, apart) in x.apart.iter().enumerate() {
        for (i, value) in apart {
            let column = T::column(&panel[i / GROUP], i % GROUP);
            for (totals, weights) in zip(totals.iter_mut(), column) {
                totals[c] = multiply_add(broadcast_f32(*value), weights, totals[c]);
            }
        }
    }
}

/// Pseudo-random numbers (xorshift64*), the same in every run.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Activations: of a few sizes, as they are in real models.
    fn activation(&mut self) -> f32 {
        let bits = self.next();
        let uniform = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        uniform * [0.2, 1.0, 1.0, 5.0][bits as usize % 4]
    }
}

/// A row of random weights: quants and integer scales of every value, f16 scales between 2^-10 and 2^-8.
fn random_row<T: Weights>(row: usize, groups: usize) -> Vec<u8> {
    let mut random = Random::new(row as u64);
    let words = (0..(groups * T::ROW_BYTES).div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    let mut bytes: Vec<u8> = words.take(groups * T::ROW_BYTES).collect();
    for group in bytes.chunks_exact_mut(T::ROW_BYTES) {
        for at in T::F16_AT {
            group[at + 1] = 0x14 + group[at + 1] % 8;
        }
    }
    bytes
}

/// A row of the largest values in all combinations of sign: every byte is one of four, every integer scale of three.
fn extreme_row<T: Weights>(row: usize, groups: usize) -> Vec<u8> {
    let mut bytes = random_row::<T>(row, groups);
    for group in bytes.chunks_exact_mut(T::ROW_BYTES) {
        let random = group.to_vec();
        group.fill([0x00, 0xff, 0x80, 0x7f][row % 4]);
        group[T::SCALES_AT].fill([0x80, 0xff, 0x7f][row / 4 % 3]);
        for at in T::F16_AT {
            group[*at..at + 2].copy_from_slice(&random[*at..at + 2]);
        }
    }
    bytes
}

/// The rows as panels.
fn pack<T: Weights, const O: usize>(
    row: impl Fn(usize, usize) -> Vec<u8>,
    n_panels: usize,
    groups: usize,
) -> Panels<T::Packed<O>> {
    let mut panels = Panels::new(n_panels * groups);
    for (panel, packed) in panels.items_mut().chunks_exact_mut(groups).enumerate() {
        let rows: [[Vec<u8>; 8]; O] = from_fn(|o| from_fn(|r| row(8 * O * panel + 8 * o + r, groups)));
        for (g, packed) in packed.iter_mut().enumerate() {
            let group = g * T::ROW_BYTES..(g + 1) * T::ROW_BYTES;
            *packed = T::pack(&rows.each_ref().map(|rows| rows.each_ref().map(|row| &row[group.clone()])));
        }
    }
    panels
}

/// A row times decoded activations in f64, and the sum of the products' absolute values.
fn plain_product<T: Weights>(row: &[u8], x: &[f64]) -> (f64, f64) {
    let weights = row.chunks_exact(T::ROW_BYTES).flat_map(T::decode);
    zip(weights, x).fold((0.0, 0.0), |(sum, size), (w, x)| (sum + w * x, size + (w * x).abs()))
}

/// Fails unless `got` is the plain product, up to f32 rounding.
fn assert_close(got: f32, (expected, size): (f64, f64), what: &str) {
    let error = (f64::from(got) - expected).abs();
    assert!(error <= 2e-6 * size + 1e-30, "{what}: {got}, not {expected} (error {:.1e} of the size)", error / size);
}

/// Compares single columns of a panel's first group, decoded to floats, to the format's definition.
fn check_columns<T: Weights, const O: usize>(w: &T::Packed<O>, row: impl Fn(usize) -> Vec<u8>) {
    let rows: Vec<[f64; GROUP]> = (0..8 * O).map(|r| T::decode(&row(r)[..T::ROW_BYTES])).collect();
    for k in 0..GROUP {
        for (o, column) in T::column(w, k).into_iter().enumerate() {
            let mut got = [f32::NAN; 8];
            store_f32(&mut got, column);
            for (row, got) in zip(&rows[8 * o..], got) {
                let size = row.iter().fold(0.0_f64, |max, weight| max.max(weight.abs()));
                assert_close(got, (row[k], size), T::NAME);
            }
        }
    }
}

/// Compares both kernels of every form to plain scalar arithmetic, and to each other bit for bit.
fn check<T: Weights, const O: usize>() {
    const PANELS: usize = 6;
    const GROUPS: usize = 5;
    let mut random = Random::new(1);
    let columns: [Vec<f32>; TILE_COLUMNS] = [
        (0..GROUPS * GROUP).map(|_| random.activation()).collect(),
        vec![3.0; GROUPS * GROUP], // all quants 127, all multipliers 63
        (0..GROUPS * GROUP).map(|k| if k % 7 < 3 { -1e5 } else { 1e5 }).collect(),
        (0..GROUPS * GROUP).map(|k| if k < 300 { 0.0 } else { random.activation() * 1e-3 }).collect(),
    ];
    type Row = fn(usize, usize) -> Vec<u8>;
    for row in [random_row::<T> as Row, extreme_row::<T>] {
        let w = pack::<T, O>(row, PANELS, GROUPS);
        check_columns::<T, O>(&w.items()[0], |r| row(r, GROUPS));
        for variant in variants::<T, O>() {
            let tile = (variant.quantise_tile)(columns.each_ref().map(Vec::as_slice));
            let mut of_tile = [[[[f32::NAN; 8]; TILE_COLUMNS]; O]; PANELS];
            (variant.matmul)(w.items(), &[tile], &mut of_tile);
            for (c, column) in columns.iter().enumerate() {
                let x = (variant.quantise)([column]);
                let decoded = (variant.decode)(&x);
                let mut out = [[[f32::NAN; 8]; O]; PANELS];
                (variant.matvec)(w.items(), &x, &mut out, 0);
                for (r, got) in out.as_flattened().as_flattened().iter().enumerate() {
                    let what = format!("{}, {}, {} rows: row {r} of column {c}", T::NAME, variant.form, 8 * O);
                    assert_close(*got, plain_product::<T>(&row(r, GROUPS), &decoded), &what);
                    let in_tile = of_tile[r / (8 * O)][r / 8 % O][c][r % 8];
                    assert!(in_tile.to_bits() == got.to_bits(), "{what}: {got}, but {in_tile} in a tile");
                }
            }
        }
    }
}

/// Settings of the command line.
struct Options {
    json: Option<String>,
    mib: usize,
    rounds: usize,
    check_only: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options { json: None, mib: 512, rounds: 9, check_only: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        let number = |text: String| match text.parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(format!("{argument} needs a number above 0, not {text}")),
        };
        match argument.as_str() {
            "--json" => options.json = Some(value()?),
            "--mib" => options.mib = number(value()?)?,
            "--rounds" => options.rounds = number(value()?)?,
            "--check" => options.check_only = true,
            _ => return Err(format!("unknown argument {argument}")),
        }
    }
    Ok(options)
}

fn main() {
    if let Err(why) = run() {
        eprintln!("{why}\nusage: cargo run --release -- [--json OUT.json] [--mib N] [--rounds N] [--check]");
        std::process::exit(2);
    }
}

fn run() -> Result<(), String> {
    let options = options()?;
    check_both::<Q4K>();
    check_both::<Q6K>();
    check_both::<Q8_0>();
    println!("All variants give the plain scalar results, and the same bits in a tile as alone.\n");
    if options.check_only {
        return Ok(());
    }
    let mut report = bench::Report::new(options.mib, options.rounds);
    report.measure::<Q4K>();
    report.measure::<Q6K>();
    report.measure::<Q8_0>();
    println!("{}", report.tables());
    if let Some(path) = options.json {
        std::fs::write(&path, report.json()).map_err(|why| format!("{path}: {why}"))?;
    }
    Ok(())
}

fn check_both<T: Weights>() {
    check::<T, 1>();
    check::<T, 2>();
}
