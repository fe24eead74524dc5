//! Activation formats: int8 in -127..=127, groups of 256.

use std::array::from_fn;

/// Columns that are quantised together.
pub const GROUP: usize = 256;
const LARGEST: f32 = 127.0;
/// Of the integer multipliers of a two-level format.
const LARGEST_MULTIPLIER: f32 = 63.0;

/// What the scales of a format belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// One f32 for the group.
    Group,
    /// One f32 for each block.
    Block,
    /// One f32 for the group, times an integer from 1 to 63 for each block.
    TwoLevel,
}

/// An activation format. Its constants are known to the compiler, which makes a kernel for each.
pub trait Form {
    /// As printed.
    const NAME: &'static str;
    /// What the scales belong to.
    const SCALING: Scaling;
    /// Columns in a block.
    const WIDTH: usize;
    /// How many of the largest elements of a column of x are kept apart, in f32.
    const APART: usize;
    /// Columns over which a kernel may add integers before a scale of the activations or of 32 weights applies.
    const SPAN: usize = if Self::WIDTH < 32 { Self::WIDTH } else { 32 };
}

macro_rules! forms {
    ($($type:ident $name:literal $scaling:ident $width:literal $apart:literal;)*) => { $(
        #[doc = $name]
        pub enum $type {}
        impl Form for $type {
            const NAME: &'static str = $name;
            const SCALING: Scaling = Scaling::$scaling;
            const WIDTH: usize = $width;
            const APART: usize = $apart;
        }
    )* };
}
forms! {
    Whole "256" Group 256 0;
    Plain32 "32 plain" Block 32 0;
    TwoLevel32 "32 two-level" TwoLevel 32 0;
    Plain16 "16 plain" Block 16 0;
    TwoLevel16 "16 two-level" TwoLevel 16 0;
    Plain32Apart "32 plain, 2 apart" Block 32 2;
    TwoLevel32Apart "32 two-level, 2 apart" TwoLevel 32 2;
}

/// 256 activations of N columns of x (of N tokens), interleaved as the kernels read them.
#[derive(Clone)]
pub struct XGroup<const N: usize> {
    /// [k / 4][column][k % 4]
    pub quants: [[[i8; 4]; N]; GROUP / 4],
    /// Of the group; 1 in the plain forms.
    pub unit: [f32; N],
    /// Of each block.
    pub scales: [[f32; N]; GROUP / 16],
    /// Of each block in the two-level forms, else 1; twice, as the 16-bit instructions take them.
    pub multipliers: [[[i16; 2]; N]; GROUP / 16],
    /// -32 times the sums of the quants at k % 4 = 0, 1 and at 2, 3, of each 16: takes Q6_K's offset off 16-bit sums.
    pub offsets: [[[i16; 2]; N]; GROUP / 16],
    /// Sum of each 32 activations, as quantised: for Q4_K's minimums.
    pub sums: [[f32; N]; GROUP / 32],
}

/// N columns of x.
pub struct Columns<const N: usize> {
    /// Quantised, without the elements apart.
    pub groups: Vec<XGroup<N>>,
    /// Of each column the elements apart, with where they are.
    pub apart: [Vec<(usize, f32)>; N],
}

/// Quantises N columns of the same length, a multiple of 256.
pub fn quantise<F: Form, const N: usize>(columns: [&[f32]; N]) -> Columns<N> {
    let apart = columns.map(|column| {
        let mut by_size: Vec<usize> = (0..column.len()).collect();
        by_size.sort_by(|i, j| column[*j].abs().total_cmp(&column[*i].abs()));
        by_size.iter().take(F::APART).map(|i| (*i, column[*i])).collect::<Vec<_>>()
    });
    let mut rest = columns.map(<[f32]>::to_vec);
    for (rest, apart) in rest.iter_mut().zip(&apart) {
        apart.iter().for_each(|(i, _)| rest[*i] = 0.0);
    }
    let group = |g: usize| quantise_group::<F, N>(rest.each_ref().map(|column| &column[g * GROUP..][..GROUP]));
    Columns { groups: (0..columns[0].len() / GROUP).map(group).collect(), apart }
}

fn quantise_group<F: Form, const N: usize>(columns: [&[f32]; N]) -> XGroup<N> {
    let mut group = XGroup {
        quants: [[[0; 4]; N]; _],
        unit: [1.0; N],
        scales: [[0.0; N]; _],
        multipliers: [[[1; 2]; N]; _],
        offsets: [[[0; 2]; N]; _],
        sums: [[0.0; N]; _],
    };
    for (c, values) in columns.into_iter().enumerate() {
        let largest = |values: &[f32]| values.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
        if F::SCALING != Scaling::Block {
            group.unit[c] = largest(values) / LARGEST;
        }
        if F::SCALING == Scaling::TwoLevel {
            group.unit[c] /= LARGEST_MULTIPLIER;
        }
        for (b, block) in values.chunks(F::WIDTH).enumerate() {
            let exact = largest(block) / LARGEST;
            let multiplier = match F::SCALING {
                // Rounded up, so that no quant exceeds 127.
                Scaling::TwoLevel if exact > 0.0 => (exact / group.unit[c]).ceil().clamp(1.0, LARGEST_MULTIPLIER),
                _ => 1.0,
            };
            let scale = if F::SCALING == Scaling::Block { exact } else { multiplier * group.unit[c] };
            group.scales[b][c] = scale;
            group.multipliers[b][c] = [multiplier as i16; 2];
            for (i, value) in block.iter().enumerate() {
                let quant = (value / scale).round_ties_even().clamp(-LARGEST, LARGEST) as i8; // NaN of 0 / 0: 0
                let k = b * F::WIDTH + i;
                group.quants[k / 4][c][k % 4] = quant;
                group.offsets[k / 16][c][k % 4 / 2] -= 32 * i16::from(quant);
                group.sums[k / 32][c] += scale * f32::from(quant);
            }
        }
    }
    group
}

impl Columns<1> {
    /// Back in floats.
    pub fn decode<F: Form>(&self) -> Vec<f64> {
        let of_group = |x: &XGroup<1>| -> [f64; GROUP] {
            from_fn(|k| f64::from(x.scales[k / F::WIDTH][0]) * f64::from(x.quants[k / 4][0][k % 4]))
        };
        let mut decoded: Vec<f64> = self.groups.iter().flat_map(of_group).collect();
        self.apart[0].iter().for_each(|(i, value)| decoded[*i] = f64::from(*value));
        decoded
    }
}
