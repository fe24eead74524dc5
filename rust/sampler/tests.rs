//! Every step of the sampler against its definition, and its edges.

use super::*;

/// Logits from a fixed sequence, roughly normal with standard deviation `spread`.
fn random_logits(n_tokens: usize, spread: f32, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut unit = || rng.next_u32() as f32 / u32::MAX as f32;
    (0..n_tokens).map(|_| spread * ((0..12).map(|_| unit()).sum::<f32>() - 6.0)).collect()
}

fn sampler(config: SamplerConfig) -> Sampler {
    Sampler::new(config).unwrap()
}

fn drawing() -> SamplerConfig {
    SamplerConfig { temperature: 1.0, seed: Some(1), ..Default::default() }
}

/// The probability of each token, straight from the definitions, in f64.
fn naive(logits: &[f32], recent: &[u32], config: &SamplerConfig) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().copied().map(f64::from).collect();
    for &(id, bias) in &config.bias {
        logits[id as usize] += f64::from(bias);
    }
    let recent = &recent[recent.len().saturating_sub(64)..];
    let penalty = f64::from(config.repeat_penalty);
    for (id, logit) in logits.iter_mut().enumerate() {
        if recent.contains(&(id as u32)) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a])); // stable: the lower id first
    if config.top_k > 0 {
        order.truncate(config.top_k);
    }
    let max = logits[order[0]];
    let softmax = |order: &[usize], temperature: f64| -> Vec<f64> {
        let weights: Vec<f64> = order.iter().map(|&id| ((logits[id] - max) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect()
    };
    let p = softmax(&order, 1.0);
    let before = |i: usize| p[..i].iter().sum::<f64>();
    let top_p = f64::from(config.top_p);
    let n_top_p = (0..order.len()).take_while(|&i| i == 0 || top_p == 1.0 || before(i) < top_p).count();
    let n_min_p = p.iter().take_while(|&&probability| probability >= f64::from(config.min_p) * p[0]).count();
    order.truncate(n_top_p.min(n_min_p));
    let mut result = vec![0.0; logits.len()];
    for (&id, p) in order.iter().zip(softmax(&order, f64::from(config.temperature))) {
        result[id] = p;
    }
    result
}

/// The probability of each token that the sampler's own steps lead to.
fn actual(logits: &[f32], recent: &[u32], config: &SamplerConfig) -> Vec<f64> {
    let mut sampler = sampler(config.clone());
    sampler.observe(recent);
    let chosen = sampler.sample(logits).unwrap();
    let Sampler { candidates, weights, .. } = sampler;
    let total: f64 = weights.iter().copied().map(f64::from).sum();
    let mut result = vec![0.0; logits.len()];
    for (i, weight) in weights.iter().enumerate() {
        let id = if config.filters(logits.len()) { candidates[i].id as usize } else { i };
        result[id] = f64::from(*weight) / total;
    }
    assert!(result[chosen as usize] > 0.0);
    result
}

#[test]
fn every_step_agrees_with_the_definitions() {
    let recent: Vec<u32> = (0..100).map(|i| i * 7 % 45).collect();
    let bias = vec![(3, 2.5), (40, -1.0), (999, f32::NEG_INFINITY)];
    let mut n_cases = 0;
    for (seed, n_tokens) in [(1, 1000), (2, 1024), (3, 5003)] {
        for spread in [0.05, 1.0, 4.0] {
            let logits = random_logits(n_tokens, spread, seed);
            for top_k in [0, 1, 7, 400, n_tokens, usize::MAX] {
                for top_p in [0.0, 0.3, 0.95, 0.9999, 1.0] {
                    for min_p in [0.0, 0.02, 0.5, 1.0] {
                        let temperature = [0.3, 1.0, 2.0][n_cases % 3];
                        let repeat_penalty = [1.0, 1.3, 0.8][n_cases / 3 % 3];
                        let bias = if n_cases % 2 == 0 { bias.clone() } else { Vec::new() };
                        let config =
                            SamplerConfig { temperature, top_k, top_p, min_p, repeat_penalty, bias, ..drawing() };
                        let expected = naive(&logits, &recent, &config);
                        let got = actual(&logits, &recent, &config);
                        for (id, (got, expected)) in got.iter().zip(&expected).enumerate() {
                            // f32 rounds (logit - max) / temperature, of up to 87, by 4e-6; beyond, weights are 0.
                            let close = (got - expected).abs() <= 1e-5 * expected + 1e-37;
                            assert!(close && (*got == 0.0 || *expected > 0.0), "token {id}: {got}, {config:?}");
                        }
                        n_cases += 1;
                    }
                }
            }
        }
    }
    assert_eq!(n_cases, 1080);
}

#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..8).map(|i| (i as f32 + 1.0).ln()).collect();
    for top_p in [1.0, 0.9] {
        let config = SamplerConfig { temperature: 0.5, top_p, ..drawing() };
        let probabilities = naive(&logits, &[], &config);
        let mut sampler = sampler(config);
        let mut counts = [0.0; 8];
        for _ in 0..20_000 {
            counts[sampler.sample(&logits).unwrap() as usize] += 1.0;
        }
        let chi_square: f64 = (0..8)
            .filter(|&i| probabilities[i] > 0.0)
            .map(|i| (counts[i] - 20_000.0 * probabilities[i]).powi(2) / (20_000.0 * probabilities[i]))
            .sum();
        assert!(chi_square < 18.5, "{chi_square}: exceeded by 1 % of the seeds at 7 degrees of freedom");
    }
}

#[test]
fn a_seed_gives_the_same_tokens_on_every_machine() {
    let logits = random_logits(5000, 2.0, 9);
    let config = SamplerConfig { temperature: 0.8, top_k: 500, top_p: 0.95, repeat_penalty: 1.2, ..drawing() };
    let tokens = |seed| {
        let mut sampler = sampler(SamplerConfig { seed, ..config.clone() });
        (0..12).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(tokens(Some(42)), [1841, 2280, 4190, 4262, 3090, 4135, 4518, 241, 2293, 2629, 4518, 721]);
    assert_eq!(tokens(Some(42)), tokens(Some(42)));
    assert_ne!(tokens(Some(42)), tokens(Some(43)));
    assert_ne!(tokens(None), tokens(None));
}

#[test]
fn the_lower_id_wins_a_tie() {
    let mut logits = vec![-0.0f32; 100];
    logits[70..].fill(0.0);
    logits[90] = -1.0;
    assert_eq!(sampler(SamplerConfig::default()).sample(&logits).unwrap(), 0);
    for (top_k, top_p) in [(80, 1.0), (0, 0.8), (1, 1.0), (0, 0.0), (80, 0.5)] {
        let config = SamplerConfig { top_k, top_p, ..drawing() };
        let kept = actual(&logits, &[], &config);
        let n_kept = kept.iter().filter(|p| **p > 0.0).count();
        assert!(kept[..n_kept].iter().all(|p| *p > 0.0), "{n_kept} with {config:?}");
        assert!(n_kept < 90);
    }
}

#[test]
fn extreme_options_and_logits() {
    let logits = [f32::NEG_INFINITY, -3e38, 5.0, 3e38, 3e38];
    let tiny = |temperature| SamplerConfig { temperature, ..drawing() };
    for temperature in [1e-6, 1e-45, 1.0, f32::MAX] {
        assert!(sampler(tiny(temperature)).sample(&logits).unwrap() != 0);
        assert_eq!(sampler(tiny(temperature)).sample(&[f32::NEG_INFINITY, -7.0]).unwrap(), 1);
    }
    assert_eq!(sampler(tiny(1e-6)).sample(&[5.0, 5.001, 4.0]).unwrap(), 1);
    let bias = vec![(4, f32::MAX), (3, f32::NEG_INFINITY)];
    let mut sampler = sampler(SamplerConfig { bias, repeat_penalty: 1e-38, ..Default::default() });
    sampler.observe(&[2, 4]);
    assert_eq!(sampler.sample(&logits).unwrap(), 2, "both 2 and 4 are at the limit of f32");
}

#[test]
fn the_penalty_sees_the_last_64_tokens() {
    let mut sampler = sampler(SamplerConfig { repeat_penalty: 2.0, ..Default::default() });
    sampler.observe(&[1]);
    sampler.observe(&[0; 63]);
    assert_eq!(sampler.sample(&[0.0, 3.0, 2.0]).unwrap(), 2, "token 1 is still in the window");
    assert_eq!(sampler.sample(&[0.0, 3.0, 2.0]).unwrap(), 1, "and has left it now; token 2 is in it");
    sampler.observe(&[2; 100]);
    assert_eq!(sampler.sample(&[-3.0, -4.0, -2.5]).unwrap(), 0, "-2.5 becomes -5, once");
}

#[test]
fn log_probability_is_that_of_the_raw_logits() {
    let logits = random_logits(1000, 3.0, 5);
    let mut sampler =
        sampler(SamplerConfig { bias: vec![(17, 100.0)], top_k: 3, logprobs: true, temperature: 0.1, ..drawing() });
    assert_eq!(sampler.last_logprob(), None);
    assert_eq!(sampler.sample(&logits).unwrap(), 17);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    assert!((f64::from(sampler.last_logprob().unwrap()) - (f64::from(logits[17]) - total.ln())).abs() < 1e-6);
}

#[test]
fn exp_is_accurate_and_ends_in_zero() {
    for i in 0..870_000 {
        let x = i as f32 * -1e-4;
        let exact = f64::from(x).exp();
        assert!((f64::from(exp(x)) - exact).abs() <= 1e-7 * exact, "{x}");
    }
    assert_eq!((exp(0.0), exp(-87.1), exp(f32::MIN), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0, 0.0));
}

#[test]
fn errors_name_the_option_and_its_value() {
    let d = SamplerConfig::default;
    let cases = [
        (SamplerConfig { temperature: -1.0, ..d() }, "temperature must be 0 or a positive number, not -1"),
        (SamplerConfig { temperature: f32::NAN, ..d() }, "temperature must be 0 or a positive number, not NaN"),
        (SamplerConfig { top_p: 1.5, ..d() }, "top_p must be from 0 to 1, not 1.5"),
        (SamplerConfig { min_p: -0.1, ..d() }, "min_p must be from 0 to 1, not -0.1"),
        (SamplerConfig { repeat_penalty: 0.0, ..d() }, "repeat_penalty must be a positive number, not 0"),
        (
            SamplerConfig { bias: vec![(1, 0.0), (7, f32::INFINITY)], ..d() },
            "the bias of token 7 must be a number, or -inf to ban it, not inf",
        ),
    ];
    for (config, message) in cases {
        assert_eq!(Sampler::new(config).unwrap_err().to_string(), message);
    }
    let bias = vec![(2, 1.0)];
    let error = sampler(SamplerConfig { bias, ..d() }).sample(&[0.0; 2]).unwrap_err();
    assert_eq!(error.to_string(), "the biased token 2 is not in the vocabulary of 2");
    let bias = vec![(0, f32::NEG_INFINITY), (1, f32::NEG_INFINITY)];
    let error = sampler(SamplerConfig { bias, ..d() }).sample(&[0.0; 2]).unwrap_err();
    assert!(matches!(&error, Error::Input(message) if message.starts_with("no token is left to choose")));
}

#[test]
fn broken_logits_are_reported() {
    for n_tokens in [1, 31, 32, 100] {
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.5; n_tokens];
            logits[n_tokens - 1] = broken;
            let bias = vec![(n_tokens as u32 - 1, f32::NEG_INFINITY)];
            for config in [SamplerConfig::default(), SamplerConfig { bias, ..drawing() }] {
                assert!(matches!(sampler(config).sample(&logits), Err(Error::Internal(_))));
            }
        }
    }
    assert!(matches!(sampler(drawing()).sample(&[]), Err(Error::Input(_))));
}
