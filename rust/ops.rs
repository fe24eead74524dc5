//! Rotary position embedding.

use crate::config::{RopeConfig, RopePairing};
use crate::kernels::Kernels;

/// One layer's rotation, ready to be applied.
pub struct Rope {
    config: RopeConfig,
    /// Radians per position, one for each pair.
    frequencies: Vec<f64>,
}

impl Rope {
    /// Pair i of `dims / 2` turns by base^(-2i / dims) / (scaling factor * frequency factor) per position.
    pub fn new(config: &RopeConfig) -> Self {
        let pair = |i: usize| {
            let factor = config.frequency_factors.as_ref().map_or(1.0, |factors| factors[i]);
            let exponent = -2.0 * i as f64 / config.dims as f64;
            libm::pow(config.base, exponent) / (config.scaling_factor * factor)
        };
        Self { frequencies: (0..config.dims / 2).map(pair).collect(), config: config.clone() }
    }

    /// Whether this is the rotation of `config`.
    pub fn is(&self, config: &RopeConfig) -> bool {
        self.config == *config
    }

    /// Pairs that are turned in a head.
    pub fn n_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosines, then sines, of every pair's angle at `position`, [2, pairs].
    pub fn turns(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.n_pairs());
        for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(&self.frequencies) {
            let (sin, cos) = libm::sincos(position as f64 * frequency);
            (*cosine, *sine) = (cos as f32, sin as f32);
        }
    }

    /// Turns one head [head_dim] in place and multiplies it by `scale`.
    pub fn apply(&self, kernels: &Kernels, turns: &[f32], scale: f32, head: &mut [f32]) {
        match self.config.pairing {
            RopePairing::Adjacent => (kernels.rotate_adjacent)(head, turns, scale),
            RopePairing::Half => (kernels.rotate_halves)(head, turns, scale),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    fn rope(pairing: RopePairing) -> Rope {
        let factors = Some(vec![1.0, 2.0]);
        Rope::new(&RopeConfig { base: 100.0, scaling_factor: 4.0, frequency_factors: factors, dims: 4, pairing })
    }

    #[test]
    fn pairs_turn_by_their_angles() {
        // Frequencies: 1 / 4 and 100^(-1/2) / 8.
        let (fast, slow) = (20.0 / 4.0_f64, 20.0 / 80.0_f64);
        for (pairing, pairs) in [(RopePairing::Adjacent, [(0, 1), (2, 3)]), (RopePairing::Half, [(0, 2), (1, 3)])] {
            let rope = rope(pairing);
            let mut turns = vec![0.0; 4];
            rope.turns(20, &mut turns);
            let head = [0.5, -1.0, 2.0, 0.25, 3.0];
            let mut turned = head;
            rope.apply(kernels::choose().unwrap(), &turns, 2.0, &mut turned);
            for ((a, b), angle) in pairs.into_iter().zip([fast, slow]) {
                let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                assert!((f64::from(turned[a]) - 2.0 * (x * angle.cos() - y * angle.sin())).abs() < 1e-6);
                assert!((f64::from(turned[b]) - 2.0 * (x * angle.sin() + y * angle.cos())).abs() < 1e-6);
            }
            assert_eq!(turned[4], 6.0, "elements past the rotary dimensions are only scaled");
        }
    }
}
