//! What this machine can do: read bandwidth from memory, multiply-adds per second in registers.

use crate::error::{Result, input_error};
use crate::kernels::{self, READ_UNIT};
use crate::team::{Team, thread_count};
use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// How long a peak is measured.
const PEAK_TIME: Duration = Duration::from_millis(100);
/// Rounds of multiply-adds between looks at the clock.
const PEAK_ROUNDS: usize = 100_000;

/// Seconds that `threads` threads take to read all of `buffer`, each an equal part of it.
///
/// # Errors
/// `Error::Input` for a buffer that is too small to share out, or a thread count out of range.
pub fn read_seconds(buffer: &[u8], threads: usize, prefetch: bool) -> Result<f64> {
    let kernels = kernels::choose()?;
    let read = if prefetch { kernels.read_prefetched } else { kernels.read };
    let part = buffer.len() / threads.max(1) / READ_UNIT * READ_UNIT;
    if part == 0 {
        return Err(input_error!("{} bytes are too few for {threads} threads to read", buffer.len()));
    }
    let spans = on_each_thread(threads, |i| {
        let start = Instant::now();
        black_box(read(&buffer[i * part..(i + 1) * part]));
        (start, Instant::now())
    })?;
    let first = spans.iter().map(|span| span.0).min().expect("there is a thread");
    let last = spans.iter().map(|span| span.1).max().expect("there is a thread");
    Ok((last - first).as_secs_f64())
}

/// Multiply-adds per second of `threads` threads together, for `kind` f32 or int8.
///
/// # Errors
/// `Error::Input` for another kind or a thread count out of range.
pub fn peak(kind: &str, threads: usize) -> Result<f64> {
    let kernels = kernels::choose()?;
    let multiply = match kind {
        "f32" => kernels.peak_f32,
        "int8" => kernels.peak_int8,
        _ => return Err(input_error!("kind is {kind:?}; it must be f32 or int8")),
    };
    let rates = on_each_thread(threads, |_| {
        let (start, mut n) = (Instant::now(), 0);
        while start.elapsed() < PEAK_TIME {
            n += multiply(PEAK_ROUNDS);
        }
        n as f64 / start.elapsed().as_secs_f64()
    })?;
    Ok(rates.iter().sum())
}

/// Runs `work(i)` once on each of `threads` threads, all beginning together.
fn on_each_thread<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
    let mut team = Team::new(thread_count(Some(threads))?)?;
    let (barrier, results) = (Barrier::new(threads), Mutex::new(Vec::new()));
    team.enter(false, |crew| {
        crew.run(threads, &|i| {
            // Nobody passes before every chunk has its own thread.
            barrier.wait();
            let result = work(i);
            results.lock().expect("no holder panics").push(result);
        });
        Ok(())
    })?;
    Ok(results.into_inner().expect("no holder panics"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_on_every_thread() {
        let buffer = vec![1; 100_000];
        for threads in [1, 2, 3] {
            for prefetch in [false, true] {
                assert!(read_seconds(&buffer, threads, prefetch).unwrap() > 0.0);
            }
        }
        let mut ids = on_each_thread(3, |i| (i, std::thread::current().id())).unwrap();
        ids.sort_by_key(|(i, _)| *i);
        assert!(ids.len() == 3 && ids[0].1 != ids[1].1 && ids[1].1 != ids[2].1 && ids[0].1 != ids[2].1);
        assert!(read_seconds(&buffer, 0, false).is_err());
        assert!(read_seconds(&buffer[..10], 2, false).is_err());
        assert!(peak("f64", 1).is_err());
    }
}
