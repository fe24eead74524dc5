//! The measurements: everything that is compared runs in turn, for several rounds; a figure is the median of its rounds.

use crate::activations::{Columns, GROUP};
use crate::weights::{TILE_COLUMNS, Weights};
use crate::{Random, TileOut, Variant, assert_close, pack, plain_product, random_row, simd, variants};
use std::array::from_fn;
use std::fmt::Write;
use std::hint::black_box;
use std::rc::Rc;
use std::sync::{Barrier, Mutex};
use std::time::Instant;

/// Groups of 256 in a row when a vector is multiplied from memory.
const MATVEC_GROUPS: usize = 8;
/// How far ahead memory is asked for, bytes; 0: not at all.
const DISTANCES: [usize; 5] = [0, 1024, 2048, 4096, 8192];
const THREADS: [usize; 2] = [1, 2];

/// Rows, columns of w and columns of x when a matrix is multiplied: 256 KiB of 8-bit weights, 64 KiB of activations.
const MATMUL_ROWS: usize = 256;
const MATMUL_GROUPS: usize = 4;
const MATMUL_TILES: usize = 16;
/// Times that it is multiplied within one measurement.
const MATMUL_REPEATS: usize = 4;
const PEAK_ROUNDS: usize = 1_000_000;

/// One figure of each round.
struct Rounds(Vec<f64>);

impl Rounds {
    /// Lower quartile, median, upper quartile.
    fn quartiles(&self) -> [f64; 3] {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        [1, 2, 3].map(|quarter| {
            let at = (sorted.len() - 1) as f64 * f64::from(quarter) / 4.0;
            let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
            low + (high - low) * at.fract()
        })
    }

    fn median(&self) -> f64 {
        self.quartiles()[1]
    }

    fn json(&self) -> String {
        let [lower, median, upper] = self.quartiles();
        let best = self.0.iter().fold(0.0_f64, |best, figure| best.max(*figure));
        format!("{{\"median\": {median:.4}, \"quartiles\": [{lower:.4}, {upper:.4}], \"best\": {best:.4}}}")
    }
}

/// Reading a matrix from memory with one vector, or just reading its bytes.
struct Matvec {
    weights: &'static str,
    /// None: just reading.
    form: Option<&'static str>,
    rows: usize,
    threads: usize,
    distance: usize,
    /// GB (10^9 bytes) per second.
    speed: Rounds,
    /// Speed relative to just reading, at the distance where that is fastest, in the same round.
    share: Rounds,
}

/// Multiplying a matrix in the cache by many columns, on one thread.
struct Matmul {
    weights: &'static str,
    form: &'static str,
    rows: usize,
    /// 10^9 multiply-adds per second.
    speed: Rounds,
    /// Speed relative to the limit of `vpmaddubsw` and `vpaddw`, in the same round.
    share: Rounds,
    /// GB of weights per second when the same matrix is multiplied by one column.
    one_column: Rounds,
}

/// All results so far.
pub struct Report {
    mib: usize,
    rounds: usize,
    matvec: Vec<Matvec>,
    matmul: Vec<Matmul>,
    peak: Rounds,
}

impl Report {
    /// Without results; matrices of `mib` MiB are to be read.
    pub fn new(mib: usize, rounds: usize) -> Self {
        Self { mib, rounds, matvec: Vec::new(), matmul: Vec::new(), peak: Rounds(Vec::new()) }
    }

    /// Measures all variants of a weight format.
    pub fn measure<T: Weights>(&mut self) {
        eprintln!("measuring {}", T::NAME);
        self.measure_matmul::<T>();
        self.measure_matvec::<T, 1>();
        self.measure_matvec::<T, 2>();
    }

    fn measure_matvec<T: Weights, const O: usize>(&mut self) {
        let rows = 8 * O;
        let panel_bytes = MATVEC_GROUPS * rows * T::ROW_BYTES;
        let n_threads = THREADS[THREADS.len() - 1];
        let per_thread = (self.mib << 20) / panel_bytes / n_threads;
        let w = pack::<T, O>(random_row::<T>, per_thread * n_threads, MATVEC_GROUPS);
        let (w, bytes) = (w.items(), w.bytes());
        let mut random = Random::new(2);
        let x: Vec<f32> = (0..MATVEC_GROUPS * GROUP).map(|_| random.activation()).collect();
        let variants: Vec<(Variant<T, O>, Columns<1>)> =
            variants().into_iter().map(|variant| ((variant.quantise)([&x]), variant)).map(|(x, v)| (v, x)).collect();

        for threads in THREADS {
            let panels = w.len() / MATVEC_GROUPS / threads;
            let out: [_; 2] = from_fn(|_| Mutex::new(vec![[[f32::NAN; 8]; O]; panels]));
            // For just reading, then for each variant: the speeds at each distance.
            let mut speeds: Vec<[Vec<f64>; DISTANCES.len()]> = vec![from_fn(|_| Vec::new()); 1 + variants.len()];
            for round in 0..self.rounds {
                for i in 0..speeds.len() * DISTANCES.len() {
                    // Each round starts elsewhere.
                    let i = (i + round * 7) % (speeds.len() * DISTANCES.len());
                    let (job, distance) = (i / DISTANCES.len(), DISTANCES[i % DISTANCES.len()]);
                    let seconds = match job.checked_sub(1) {
                        None => seconds_on(threads, &|thread| {
                            let part = bytes.len() / threads;
                            black_box(simd::read(&bytes[thread * part..][..part], distance));
                        }),
                        Some(v) => {
                            let (variant, x) = &variants[v];
                            let seconds = seconds_on(threads, &|thread| {
                                let part = panels * MATVEC_GROUPS;
                                let mut out = out[thread].lock().expect("no holder panics");
                                (variant.matvec)(&w[thread * part..][..part], x, &mut out, distance);
                            });
                            for (thread, out) in out.iter().enumerate().take(threads) {
                                let out = out.lock().expect("no holder panics");
                                check_some::<T, O>(&out, thread * panels, variant, x);
                            }
                            seconds
                        }
                    };
                    speeds[job][i % DISTANCES.len()].push(bytes.len() as f64 / seconds / 1e9);
                }
            }
            let speeds = speeds.into_iter().map(|speeds| speeds.map(Rounds)).collect::<Vec<_>>();
            let fastest_read = fastest(&speeds[0]);
            for (job, speeds_of_job) in speeds.iter().enumerate() {
                for (speed, distance) in speeds_of_job.iter().zip(DISTANCES) {
                    let shares = speed.0.iter().zip(&speeds[0][fastest_read].0).map(|(speed, read)| speed / read);
                    self.matvec.push(Matvec {
                        weights: T::NAME,
                        form: job.checked_sub(1).map(|v| variants[v].0.form),
                        rows,
                        threads,
                        distance,
                        speed: Rounds(speed.0.clone()),
                        share: Rounds(shares.collect()),
                    });
                }
            }
        }
    }

    fn measure_matmul<T: Weights>(&mut self) {
        let mut random = Random::new(3);
        let columns: Vec<Vec<f32>> = (0..MATMUL_TILES * TILE_COLUMNS)
            .map(|_| (0..MATMUL_GROUPS * GROUP).map(|_| random.activation()).collect())
            .collect();
        let mut jobs = matmul_jobs::<T, 1>(&columns);
        jobs.extend(matmul_jobs::<T, 2>(&columns));
        let mut speeds = vec![[Vec::new(), Vec::new()]; jobs.len()];
        let mut peaks = Vec::new();
        for round in 0..10 * self.rounds {
            let start = Instant::now();
            let products = simd::multiply_peak(PEAK_ROUNDS);
            peaks.push(products as f64 / start.elapsed().as_secs_f64() / 1e9);
            for i in 0..jobs.len() {
                let i = (i + round) % jobs.len();
                let products = MATMUL_ROWS * MATMUL_GROUPS * GROUP * columns.len();
                let seconds = seconds_of_one(MATMUL_REPEATS, &mut jobs[i].run);
                speeds[i][0].push(products as f64 / seconds / 1e9);
                let bytes = MATMUL_ROWS * MATMUL_GROUPS * T::ROW_BYTES;
                let seconds = seconds_of_one(MATMUL_REPEATS * MATMUL_TILES, &mut jobs[i].run_one_column);
                speeds[i][1].push(bytes as f64 / seconds / 1e9);
            }
        }
        for (job, [speeds, one_column]) in jobs.iter().zip(speeds) {
            let shares = speeds.iter().zip(&peaks).map(|(speed, peak)| speed / peak).collect();
            self.matmul.push(Matmul {
                weights: T::NAME,
                form: job.form,
                rows: job.rows,
                speed: Rounds(speeds),
                share: Rounds(shares),
                one_column: Rounds(one_column),
            });
        }
        self.peak.0.extend(peaks);
    }

    /// For people, in Markdown.
    pub fn tables(&self) -> String {
        let mut text = format!("{}, by AVX2, FMA and F16C\n", cpu());
        for threads in THREADS {
            let _ = write!(
                text,
                "\nOne column, weights from memory, {threads} thread(s): GB/s by prefetch distance in bytes; the best as \
                 a share of just reading\n\n| weights | activations | rows |"
            );
            for distance in DISTANCES {
                let _ = write!(text, " {distance} |");
            }
            let _ = writeln!(text, " share |\n|---|---|---|{}", "---|".repeat(DISTANCES.len() + 1));
            for chunk in self.matvec.chunks_exact(DISTANCES.len()).filter(|chunk| chunk[0].threads == threads) {
                let first = &chunk[0];
                let _ = write!(text, "| {} | {} | {} |", first.weights, first.form.unwrap_or("(read)"), first.rows);
                for matvec in chunk {
                    let _ = write!(text, " {:.1} |", matvec.speed.median());
                }
                let best = chunk.iter().map(|matvec| matvec.share.median()).fold(0.0, f64::max);
                let _ = writeln!(text, " {:.1} % |", 100.0 * best);
            }
        }
        let _ = writeln!(
            text,
            "\n{TILE_COLUMNS} columns at a time, weights in the cache, 1 thread: GMAC/s, and the share of the limit of \
             vpmaddubsw ({:.0} GMAC/s); then one column, GB/s\n\n\
             | weights | activations | 8 rows | share | one column | 16 rows | share | one column |\n\
             |---|---|---|---|---|---|---|---|",
            self.peak.median()
        );
        for low in self.matmul.iter().filter(|matmul| matmul.rows == 8) {
            let is_same = |high: &&Matmul| high.rows == 16 && (high.weights, high.form) == (low.weights, low.form);
            let high = self.matmul.iter().find(is_same).expect("both heights are measured");
            let _ = write!(text, "| {} | {} |", low.weights, low.form);
            for matmul in [low, high] {
                let (speed, share) = (matmul.speed.median(), 100.0 * matmul.share.median());
                let _ = write!(text, " {speed:.1} | {share:.0} % | {:.1} |", matmul.one_column.median());
            }
            text.push('\n');
        }
        text
    }

    /// Everything, as one JSON object.
    pub fn json(&self) -> String {
        let matvec = self.matvec.iter().map(|m| {
            let form = m.form.map_or("null".to_owned(), |form| format!("\"{form}\""));
            format!(
                "{{\"weights\": \"{}\", \"activations\": {form}, \"rows\": {}, \"threads\": {}, \"prefetch\": {}, \
                 \"gb_s\": {}, \"share_of_read\": {}}}",
                m.weights,
                m.rows,
                m.threads,
                m.distance,
                m.speed.json(),
                m.share.json()
            )
        });
        let matmul = self.matmul.iter().map(|m| {
            format!(
                "{{\"weights\": \"{}\", \"activations\": \"{}\", \"rows\": {}, \"gmac_s\": {}, \"share_of_limit\": {}, \
                 \"one_column_gb_s\": {}}}",
                m.weights,
                m.form,
                m.rows,
                m.speed.json(),
                m.share.json(),
                m.one_column.json()
            )
        });
        let list = |items: Vec<String>| items.join(",\n    ");
        format!(
            "{{\n  \"machine\": {{\"cpu\": \"{}\", \"threads\": {}}},\n  \"isa\": \"avx2 fma f16c\",\n  \"settings\": \
             {{\"mib\": {}, \"columns\": {}, \"rounds\": {}, \"matmul_rows\": {MATMUL_ROWS}, \"matmul_k\": {}, \
             \"matmul_columns\": {}}},\n  \"vpmaddubsw_gmac_s\": {},\n  \"matvec\": [\n    {}\n  ],\n  \"matmul\": [\n    \
             {}\n  ]\n}}\n",
            cpu(),
            std::thread::available_parallelism().map_or(0, usize::from),
            self.mib,
            MATVEC_GROUPS * GROUP,
            self.rounds,
            MATMUL_GROUPS * GROUP,
            MATMUL_TILES * TILE_COLUMNS,
            self.peak.json(),
            list(matvec.collect()),
            list(matmul.collect()),
        )
    }
}

/// Seconds that one of `repeats` runs takes.
fn seconds_of_one(repeats: usize, run: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        run();
    }
    start.elapsed().as_secs_f64() / repeats as f64
}

/// The index of the largest median.
fn fastest(speeds: &[Rounds]) -> usize {
    (0..speeds.len()).max_by(|a, b| speeds[*a].median().total_cmp(&speeds[*b].median())).expect("there are some")
}

/// A multiplication to be timed.
struct MatmulJob {
    form: &'static str,
    rows: usize,
    run: Box<dyn FnMut()>,
    run_one_column: Box<dyn FnMut()>,
}

fn matmul_jobs<T: Weights, const O: usize>(columns: &[Vec<f32>]) -> Vec<MatmulJob> {
    let w = Rc::new(pack::<T, O>(random_row::<T>, MATMUL_ROWS / (8 * O), MATMUL_GROUPS));
    let job = |variant: Variant<T, O>| {
        let tiles = columns.as_chunks::<TILE_COLUMNS>().0;
        let x: Vec<_> = tiles.iter().map(|tile| (variant.quantise_tile)(tile.each_ref().map(Vec::as_slice))).collect();
        let (w, n_panels) = (Rc::clone(&w), w.items().len() / MATMUL_GROUPS);
        let mut out = vec![[[[f32::NAN; 8]; TILE_COLUMNS]; O]; n_panels * x.len()];
        (variant.matmul)(w.items(), &x, &mut out);
        check_columns::<T, O>(&out, columns, &variant);
        let (vector, vector_w) = ((variant.quantise)([&columns[0]]), Rc::clone(&w));
        let mut vector_out = vec![[[f32::NAN; 8]; O]; n_panels];
        MatmulJob {
            form: variant.form,
            rows: 8 * O,
            run: Box::new(move || (variant.matmul)(w.items(), &x, black_box(&mut out))),
            run_one_column: Box::new(move || {
                (variant.matvec)(vector_w.items(), &vector, black_box(&mut vector_out), 0)
            }),
        }
    };
    variants().into_iter().map(job).collect()
}

/// Compares one row of every column to plain arithmetic.
fn check_columns<T: Weights, const O: usize>(out: &[TileOut<O>], columns: &[Vec<f32>], variant: &Variant<T, O>) {
    for (c, column) in columns.iter().enumerate() {
        let row = (37 * c) % MATMUL_ROWS;
        let x = (variant.decode)(&(variant.quantise)([column]));
        let tile = &out[row / (8 * O) * (columns.len() / TILE_COLUMNS) + c / TILE_COLUMNS];
        let got = tile[row / 8 % O][c % TILE_COLUMNS][row % 8];
        assert_close(got, plain_product::<T>(&random_row::<T>(row, MATMUL_GROUPS), &x), variant.form);
    }
}

/// Compares some panels to plain arithmetic; `out` is that of panels from `first`.
fn check_some<T: Weights, const O: usize>(
    out: &[[[f32; 8]; O]],
    first: usize,
    variant: &Variant<T, O>,
    x: &Columns<1>,
) {
    let x = (variant.decode)(x);
    for panel in [0, out.len() / 2, out.len() - 1] {
        for (i, got) in out[panel].as_flattened().iter().enumerate() {
            let row = random_row::<T>(8 * O * (first + panel) + i, MATVEC_GROUPS);
            assert_close(*got, plain_product::<T>(&row, &x), variant.form);
        }
    }
}

/// Seconds from when `threads` threads begin `work(thread)` together to when the last one is done.
fn seconds_on(threads: usize, work: &(impl Fn(usize) + Sync)) -> f64 {
    let barrier = Barrier::new(threads);
    let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let start = |thread| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                work(thread);
                (start, Instant::now())
            })
        };
        let handles: Vec<_> = (0..threads).map(start).collect();
        handles.into_iter().map(|handle| handle.join().expect("work does not panic")).collect()
    });
    let first = spans.iter().map(|span| span.0).min().expect("there is a thread");
    let last = spans.iter().map(|span| span.1).max().expect("there is a thread");
    (last - first).as_secs_f64()
}

/// The CPU's name, family and model; Linux only.
fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key));
        line.and_then(|line| line.split(':').nth(1)).map_or("?", str::trim)
    };
    format!("{}, family {}, model {}", value("model name"), value("cpu family"), value("model"))
}
