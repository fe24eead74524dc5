//! The AVX2 instructions of the trial, by shorter names.

#[cfg(not(all(target_feature = "avx2", target_feature = "fma", target_feature = "f16c")))]
compile_error!("run cargo in the trial's own folder: its .cargo/config.toml turns AVX2, FMA and F16C on");

use std::arch::x86_64::*;

/// 32 bytes, 16 or 8 integers.
pub type Ints = __m256i;
/// 8 floats.
pub type Floats = __m256;

/// Functions that the CPU has an instruction for, or two.
macro_rules! instructions {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty { $body:expr })*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name($($argument: $type),*) -> $result {
            // SAFETY: they touch no memory, and the whole program is compiled for CPUs that have them (see above).
            unsafe { $body }
        }
    )* };
}
instructions! {
    fn zero() -> Ints { _mm256_setzero_si256() }
    fn zero_f32() -> Floats { _mm256_setzero_ps() }

    /// The same four activations for every row.
    fn broadcast_i8(four: [i8; 4]) -> Ints { _mm256_set1_epi32(i32::from_le_bytes(four.map(i8::cast_unsigned))) }
    /// The same pair for every row.
    fn broadcast_i16(pair: [i16; 2]) -> Ints {
        _mm256_set1_epi32(i32::from(pair[1]) << 16 | i32::from(pair[0].cast_unsigned()))
    }
    fn broadcast_f32(value: f32) -> Floats { _mm256_set1_ps(value) }

    /// Each of eight unsigned bytes twice, in 16 bits.
    fn pairs_u8(bytes: &[u8; 8]) -> Ints { _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(eight(bytes), eight(bytes))) }
    /// Each of eight signed bytes twice, in 16 bits.
    fn pairs_i8(bytes: &[u8; 8]) -> Ints { _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(eight(bytes), eight(bytes))) }
    /// Eight unsigned bytes as floats.
    fn floats_u8(bytes: &[u8; 8]) -> Floats { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(bytes))) }
    /// Eight signed bytes as floats.
    fn floats_i8(bytes: &[u8; 8]) -> Floats { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(bytes))) }
    /// Eight 32-bit integers as floats.
    fn floats(a: Ints) -> Floats { _mm256_cvtepi32_ps(a) }
    /// Eight f16, little-endian.
    fn floats_f16(halves: &[[u8; 2]; 8]) -> Floats { _mm256_cvtph_ps(sixteen(halves.as_flattened())) }

    /// `a & mask` in every byte.
    fn and(a: Ints, mask: i8) -> Ints { _mm256_and_si256(a, _mm256_set1_epi8(mask)) }
    fn or(a: Ints, b: Ints) -> Ints { _mm256_or_si256(a, b) }
    /// Shifts 16 bits; what crosses between bytes is to be masked. A constant is recognised.
    fn shift_right(a: Ints, bits: i32) -> Ints { _mm256_srl_epi16(a, _mm_cvtsi32_si128(bits)) }
    fn shift_left(a: Ints, bits: i32) -> Ints { _mm256_sll_epi16(a, _mm_cvtsi32_si128(bits)) }

    /// Bits from `first` on, as many as are set in `mask`, of every 32.
    fn bits(a: Ints, first: usize, mask: i32) -> Ints {
        _mm256_and_si256(_mm256_srl_epi32(a, _mm_cvtsi32_si128(first as i32)), _mm256_set1_epi32(mask))
    }
    /// Bits from `first` to `first` + 7 of every 32, signed.
    fn signed_byte(a: Ints, first: usize) -> Ints {
        _mm256_srai_epi32::<24>(_mm256_sll_epi32(a, _mm_cvtsi32_si128(24 - first as i32)))
    }
    /// `high * 16 + low - 32` in 32 bits.
    fn centred_6_bits(high: Ints, low: Ints) -> Ints {
        _mm256_sub_epi32(_mm256_or_si256(_mm256_slli_epi32::<4>(high), low), _mm256_set1_epi32(32))
    }

    /// Unsigned bytes times signed bytes, two products added in 16 bits.
    fn multiply_bytes(unsigned: Ints, signed: Ints) -> Ints { _mm256_maddubs_epi16(unsigned, signed) }
    /// 16-bit integers, two products added in 32 bits.
    fn multiply_pairs(a: Ints, b: Ints) -> Ints { _mm256_madd_epi16(a, b) }
    /// The low 16 bits of products of 16-bit integers.
    fn multiply_i16(a: Ints, b: Ints) -> Ints { _mm256_mullo_epi16(a, b) }
    fn add_i16(a: Ints, b: Ints) -> Ints { _mm256_add_epi16(a, b) }
    fn add_i32(a: Ints, b: Ints) -> Ints { _mm256_add_epi32(a, b) }
    /// In every byte, unsigned.
    fn abs_i8(a: Ints) -> Ints { _mm256_abs_epi8(a) }
    /// Every byte of `a` times -1, 0 or 1, the sign of that of `b`.
    fn sign_i8(a: Ints, b: Ints) -> Ints { _mm256_sign_epi8(a, b) }

    fn add(a: Floats, b: Floats) -> Floats { _mm256_add_ps(a, b) }
    fn multiply(a: Floats, b: Floats) -> Floats { _mm256_mul_ps(a, b) }
    /// `a * b + c`
    fn multiply_add(a: Floats, b: Floats, c: Floats) -> Floats { _mm256_fmadd_ps(a, b, c) }
    /// `c - a * b`
    fn subtract_product(a: Floats, b: Floats, c: Floats) -> Floats { _mm256_fnmadd_ps(a, b, c) }

    fn add_i8(a: Ints, b: Ints) -> Ints { _mm256_add_epi8(a, b) }
    fn add_i64(a: Ints, b: Ints) -> Ints { _mm256_add_epi64(a, b) }
    fn same_i8(value: i8) -> Ints { _mm256_set1_epi8(value) }
}

/// 32 bytes.
#[inline(always)]
pub fn load<T: Copy, const N: usize>(from: &[T; N]) -> Ints {
    const { assert!(size_of::<[T; N]>() == 32) };
    // SAFETY: 32 bytes at any alignment; T is an integer or an array of them, without padding.
    unsafe { _mm256_loadu_si256(std::ptr::from_ref(from).cast()) }
}

/// The inverse of `load`.
#[inline(always)]
pub fn store<T: Copy, const N: usize>(to: &mut [T; N], value: Ints) {
    const { assert!(size_of::<[T; N]>() == 32) };
    // SAFETY: as in `load`; T is valid for any bits.
    unsafe { _mm256_storeu_si256(std::ptr::from_mut(to).cast(), value) };
}

#[inline(always)]
pub fn load_f32(from: &[f32; 8]) -> Floats {
    // SAFETY: 8 floats at any alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline(always)]
pub fn store_f32(to: &mut [f32; 8], value: Floats) {
    // SAFETY: 8 floats at any alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) };
}

#[inline(always)]
fn sixteen(from: &[u8]) -> __m128i {
    assert!(from.len() == 16);
    // SAFETY: 16 bytes at any alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline(always)]
fn eight(from: &[u8; 8]) -> __m128i {
    // SAFETY: 8 bytes at any alignment.
    unsafe { _mm_loadl_epi64(from.as_ptr().cast()) }
}

/// Keeps the compiler from rearranging what led to `value`: it would need more registers than there are.
#[inline(always)]
pub fn pin(value: &mut Ints) {
    // SAFETY: no instruction.
    unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) * value, options(pure, nomem, nostack, preserves_flags)) };
}

/// Asks for the cache line at `address`, which may lie outside any object.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    // SAFETY: a prefetch of any address has no effect that a program can see.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Adds up 64-bit words of `bytes`, asking for memory `distance` bytes ahead if that is not 0: the fastest way to read.
#[inline(never)]
pub fn read(bytes: &[u8], distance: usize) -> u64 {
    let mut sums = [zero(); 8];
    for unit in bytes.as_chunks::<256>().0 {
        if distance != 0 {
            for line in 0..4 {
                prefetch(unit.as_ptr().wrapping_add(distance + 64 * line));
            }
        }
        for (sum, part) in sums.iter_mut().zip(unit.as_chunks::<32>().0) {
            *sum = add_i64(*sum, load(part));
        }
    }
    let mut words = [0_u64; 4];
    store(&mut words, sums.into_iter().fold(zero(), add_i64));
    words.into_iter().fold(0, u64::wrapping_add)
}

/// Runs `rounds` of byte products added in 16 bits on independent registers; returns how many products these were.
#[inline(never)]
pub fn multiply_peak(rounds: usize) -> usize {
    const CHAINS: usize = 8;
    // Own weights for each register and other values in each round, or the compiler would multiply once for many.
    let weights: [Ints; CHAINS] = std::hint::black_box(std::array::from_fn(|i| same_i8(i as i8)));
    let mut values = std::hint::black_box(same_i8(5));
    let mut sums = std::hint::black_box([zero(); CHAINS]);
    for _ in 0..rounds {
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = add_i16(*sum, multiply_bytes(weights, values));
        }
        values = add_i8(values, weights[1]);
    }
    std::hint::black_box(sums);
    rounds * CHAINS * 32
}
