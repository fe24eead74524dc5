//! The worker team: the only place where threads start, and the rule for how many.
//!
//! A forward pass runs a few hundred short operations one after the other. Workers therefore enter once per
//! forward ([`Team::enter`]) and stay, spinning, until it ends; an operation ([`Crew::run`]) is published by one
//! atomic store and its chunks are claimed by atomic increments. The calling thread works too, so a worker that
//! the operating system has put aside delays nobody unless it holds a chunk.

use crate::cores;
use crate::error::{Error, Result, input_error};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Environment variable that overrides the default thread count.
const THREADS_VAR: &str = "LARQL_NUM_THREADS";
/// Far more than any machine has cores; a larger number is a mistake.
const MAX_THREADS: usize = 1024;
/// Times a waiting thread looks before it offers its core to others.
const SPINS_BEFORE_YIELD: u32 = 20_000;

/// Threads for a forward: the caller's wish, else `LARQL_NUM_THREADS`, else fast physical cores within the affinity
/// mask and the container's CPU quota.
///
/// # Errors
/// `Error::Input` for zero, too many, or a variable that is no number.
pub fn thread_count(wish: Option<usize>) -> Result<usize> {
    let check = |n: usize, origin: &str| {
        if (1..=MAX_THREADS).contains(&n) {
            Ok(n)
        } else {
            Err(input_error!("{origin} is {n}; it must be from 1 to {MAX_THREADS}"))
        }
    };
    if let Some(n) = wish {
        return check(n, "threads");
    }
    if let Some(text) = std::env::var(THREADS_VAR).ok().filter(|text| !text.is_empty()) {
        let n =
            text.trim().parse().map_err(|_| input_error!("{THREADS_VAR} is {text:?}; it must be a whole number"))?;
        return check(n, THREADS_VAR);
    }
    Ok(cores::n_fast())
}

/// Threads that run the operations of a forward together.
pub struct Team {
    /// The helpers of the calling thread; absent when it works alone.
    pool: Option<rayon::ThreadPool>,
    n_threads: usize,
    /// The CPUs that helpers stay on, where not all will do. The calling thread goes where the system puts it: what it
    /// does, and the processes that it starts, are not ours.
    cpus: Option<Vec<usize>>,
    /// The process that started the pool: threads do not survive a fork.
    pid: u32,
}

impl Team {
    /// A team of `n_threads`, the calling thread included.
    ///
    /// # Errors
    /// `Error::Internal` when the system refuses to start threads.
    pub fn new(n_threads: usize) -> Result<Self> {
        Self::on(cores::stay_on(n_threads).map(Vec::from), n_threads)
    }

    fn on(cpus: Option<Vec<usize>>, n_threads: usize) -> Result<Self> {
        Ok(Self { pool: Self::start(cpus.clone(), n_threads)?, n_threads, cpus, pid: std::process::id() })
    }

    /// Threads that work in a forward.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    fn start(cpus: Option<Vec<usize>>, n_threads: usize) -> Result<Option<rayon::ThreadPool>> {
        if n_threads == 1 {
            return Ok(None);
        }
        rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads - 1)
            .thread_name(|i| format!("larql-{}", i + 1))
            .start_handler(move |_| {
                if let Some(cpus) = &cpus {
                    cores::keep_to(cpus);
                }
            })
            .build()
            .map(Some)
            .map_err(|e| Error::Internal(format!("cannot start {} threads: {e}", n_threads - 1)))
    }

    /// Runs `work` on the calling thread with the team at hand. `timed` measures how long that thread waits.
    ///
    /// # Errors
    /// What `work` returns, or `Error::Internal` when it or a worker panicked.
    pub fn enter<R>(&mut self, timed: bool, work: impl FnOnce(&Crew) -> Result<R>) -> Result<R> {
        if self.pid != std::process::id() {
            // The old pool's threads live in the parent only, so its drop would wait for ever.
            std::mem::forget(self.pool.take());
            self.pool = Self::start(self.cpus.clone(), self.n_threads)?;
            self.pid = std::process::id();
        }
        let crew = Crew::new(self.n_threads, timed);
        let guarded = || {
            let _dismiss = Dismiss(&crew);
            catch_unwind(AssertUnwindSafe(|| work(&crew)))
        };
        let outcome = match &self.pool {
            None => guarded(),
            Some(pool) => pool.in_place_scope(|scope| {
                scope.spawn_broadcast(|_, _| crew.serve());
                guarded()
            }),
        };
        outcome.unwrap_or_else(|panic| Err(Error::Internal(panic_text(&*panic))))
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("panic without a message").to_owned()
}

/// Sends the workers home, also when the forward unwinds.
struct Dismiss<'a>(&'a Crew);

impl Drop for Dismiss<'_> {
    fn drop(&mut self) {
        self.0.dismissed.store(true, Ordering::Release);
    }
}

type Job = *const (dyn Fn(usize) + Sync);

/// The team during one forward.
///
/// `ticket` holds the number of chunks of the current operation (high half) and the next unclaimed one (low half).
/// A claim below the number of chunks gives the right to read `job` until that chunk is counted in `completed`;
/// the caller changes `job` only when all chunks are counted.
pub struct Crew {
    n_threads: usize,
    ticket: AtomicU64,
    completed: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    panic: std::sync::Mutex<Option<Box<dyn std::any::Any + Send>>>,
    dismissed: AtomicBool,
    /// Nanoseconds that the calling thread has waited for workers; None when that is not measured.
    waited: Option<AtomicU64>,
}

// SAFETY: `job` is the only field that is not Sync by itself; the protocol above orders its writes and reads.
unsafe impl Sync for Crew {}

impl Crew {
    fn new(n_threads: usize, timed: bool) -> Self {
        Self {
            n_threads,
            ticket: AtomicU64::new(0),
            completed: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: std::sync::Mutex::new(None),
            dismissed: AtomicBool::new(false),
            waited: timed.then(AtomicU64::default),
        }
    }

    /// Threads that work on an operation.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Calls `f(0) .. f(n_chunks - 1)`, spread over the team, and returns when all are done.
    ///
    /// Only the thread that entered may call it, and not from within `f`. A panic in `f` comes out here.
    pub fn run(&self, n_chunks: usize, f: &(dyn Fn(usize) + Sync)) {
        if self.n_threads == 1 || n_chunks <= 1 {
            (0..n_chunks).for_each(f);
            return;
        }
        let n = u32::try_from(n_chunks).expect("fewer than 2^32 chunks");
        // SAFETY: erases the lifetime of `f` only; this function returns after the last use of `job`.
        let job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(f) };
        // SAFETY: every claim on the previous job is completed, so no one reads the cell now.
        unsafe { *self.job.get() = Some(job) };
        self.completed.store(0, Ordering::Relaxed);
        self.ticket.store(u64::from(n) << 32, Ordering::Release);
        while self.work() {}
        self.wait_for(n_chunks);
        if let Some(panic) = self.panic.lock().expect("nothing panics while it holds this lock").take() {
            resume_unwind(panic);
        }
    }

    /// Calls `f(i, row)` for each row of `row_len` elements of `rows`, spread over the team.
    pub fn for_rows<T: Send>(&self, rows: &mut [T], row_len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        assert_eq!(rows.len() % row_len, 0, "whole rows");
        let n_rows = rows.len() / row_len;
        let rows = Shared::new(rows);
        self.run(n_rows, &|i| {
            // SAFETY: each chunk takes its own row.
            f(i, unsafe { rows.part(i * row_len..(i + 1) * row_len) });
        });
    }

    /// How long the calling thread has waited for workers so far; zero when that is not measured.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.as_ref().map_or(0, |waited| waited.load(Ordering::Relaxed)))
    }

    fn wait_for(&self, n_chunks: usize) {
        let start = self.waited.as_ref().map(|waited| (waited, Instant::now()));
        let mut wait = Wait::default();
        while self.completed.load(Ordering::Acquire) < n_chunks {
            wait.pause();
        }
        if let Some((waited, start)) = start {
            waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// A worker's life during one forward.
    fn serve(&self) {
        let mut wait = Wait::default();
        while !self.dismissed.load(Ordering::Acquire) {
            if self.work() {
                wait = Wait::default();
            } else {
                wait.pause();
            }
        }
    }

    /// Claims one chunk and runs it; false when there was none.
    fn work(&self) -> bool {
        let open = |ticket: u64| (ticket as u32) < (ticket >> 32) as u32;
        if !open(self.ticket.load(Ordering::Relaxed)) {
            return false;
        }
        let ticket = self.ticket.fetch_add(1, Ordering::AcqRel);
        if !open(ticket) {
            return false;
        }
        // SAFETY: the claim keeps the job in place and alive until `completed` counts it.
        let job = unsafe { &*(*self.job.get()).expect("an open ticket has a job") };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(ticket as u32 as usize))) {
            *self.panic.lock().expect("nothing panics while it holds this lock") = Some(panic);
        }
        self.completed.fetch_add(1, Ordering::Release);
        true
    }
}

/// Spins for a while, then gives way to other threads.
#[derive(Default)]
struct Wait(u32);

impl Wait {
    fn pause(&mut self) {
        if self.0 < SPINS_BEFORE_YIELD {
            self.0 += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// A slice whose disjoint parts are written by different workers.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out `&mut [T]` to other threads, which `T: Send` allows; `part` forbids overlaps.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Takes the slice for the lifetime of the operation.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// - No other live part overlaps `range`.
    #[allow(clippy::mut_from_ref)] // the point of the type; see Safety
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once() {
        for n_threads in [1, 2, 3, 5] {
            let mut team = Team::new(n_threads).unwrap();
            for n_chunks in [0, 1, 2, 7, 1000] {
                let counts: Vec<_> = (0..n_chunks).map(|_| AtomicUsize::new(0)).collect();
                let total = team.enter(false, |crew| {
                    for _ in 0..50 {
                        crew.run(n_chunks, &|i| {
                            counts[i].fetch_add(1, Ordering::Relaxed);
                        });
                    }
                    Ok(counts.iter().map(|c| c.load(Ordering::Relaxed)).sum::<usize>())
                });
                assert_eq!(total.unwrap(), 50 * n_chunks);
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn a_panic_fails_the_forward_and_leaves_the_team_usable() {
        let mut team = Team::new(3).unwrap();
        for bad in [0, 99] {
            let outcome: Result<()> = team.enter(false, |crew| {
                crew.run(100, &|i| assert!(i != bad, "chunk {i} fails"));
                Ok(())
            });
            assert!(matches!(outcome, Err(Error::Internal(text)) if text.contains("fails")));
        }
        let mut rows = vec![0; 60];
        let outcome = team.enter(false, |crew| {
            crew.for_rows(&mut rows, 6, |i, row| row.fill(i));
            Ok(())
        });
        assert!(outcome.is_ok());
        assert!(rows.iter().enumerate().all(|(i, &v)| v == i / 6));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn helpers_stay_on_their_cpus() {
        let first = cores::allowed()[0];
        let caller = std::thread::current().id();
        let mut team = Team::on(Some(vec![first, usize::MAX]), 3).unwrap();
        let may_use = |n: usize| std::thread::available_parallelism().unwrap().get() == n;
        let before = std::thread::available_parallelism().unwrap().get();
        let met = AtomicUsize::new(0);
        let outcome = team.enter(false, |crew| {
            crew.run(3, &|_| {
                // Each thread has one chunk: it leaves when all are there.
                met.fetch_add(1, Ordering::AcqRel);
                while met.load(Ordering::Acquire) < 3 {
                    std::thread::yield_now();
                }
                let is_caller = std::thread::current().id() == caller;
                assert!(may_use(if is_caller { before } else { 1 }));
            });
            Ok(())
        });
        outcome.unwrap();
        let anywhere = Team::on(None, 2).unwrap();
        assert!(anywhere.pool.unwrap().install(|| may_use(before)));
    }

    #[test]
    fn thread_counts_are_checked() {
        assert_eq!(thread_count(Some(3)).unwrap(), 3);
        assert!(thread_count(Some(0)).is_err());
        assert!(thread_count(Some(100_000)).is_err());
        assert!(thread_count(None).unwrap() >= 1);
    }
}
