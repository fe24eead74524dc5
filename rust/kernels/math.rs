//! Elementary functions and reductions whose every bit is fixed: the same on every instruction set.
//!
//! Only additions, multiplications, divisions, comparisons, square roots and fused multiply-adds are used, each
//! correctly rounded by IEEE 754, in one order. Loops over `[f32; LANES]` are what the compiler vectorises.

/// Lanes of every vector reduction, rows of a weight panel, positions interleaved in a K page.
///
/// One AVX-512 register, two of AVX2, four of NEON.
pub const LANES: usize = 16;

/// One f32 for each lane.
pub type Lanes = [f32; LANES];

/// e^x, relative error below 2e-7; arguments are clamped to [-87.3, 88.3], so results are finite and positive.
///
/// Cody-Waite range reduction and the degree-5 polynomial of the Cephes library (S. Moshier, `expf`).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = if x > 88.3 { 88.3 } else { x };
    let x = if x > -87.3 { x } else { -87.3 };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p.mul_add(r, c);
    }
    let e = (r * r).mul_add(p, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    e * f32::from_bits(exponent)
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// tanh(x), absolute error below 3e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// The sum of all lanes, by halving: lane i joins lane i + 8, then i + 4, and so on.
#[inline(always)]
pub fn sum(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The largest of all lanes.
#[inline(always)]
pub fn max(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = lanes[i].max(lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of squares; element i goes to lane i mod LANES.
#[inline(always)]
pub fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            lanes[i] = chunk[i].mul_add(chunk[i], lanes[i]);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane = v.mul_add(*v, *lane);
    }
    sum(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_f64() {
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) / want - 1.0).abs() < 2e-7, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(1e30).is_finite());
    }

    #[test]
    fn tanh_and_sigmoid_are_close_to_f64() {
        for i in -20_000..20_000 {
            let x = i as f32 * 1e-3;
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7, "{x}");
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(sigmoid(x)) / want - 1.0).abs() < 4e-7, "{x}");
        }
    }

    #[test]
    fn reductions_count_every_element() {
        for n in 0..50 {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let padded = std::array::from_fn(|i| x.get(i).copied().unwrap_or(0.0));
            assert_eq!(max(padded), x.iter().take(LANES).fold(0.0, |max, v| v.max(max)));
            assert_eq!(sum_of_squares(&x), x.iter().map(|v| v * v).sum::<f32>());
        }
    }
}
