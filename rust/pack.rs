//! From block rows to panels and back: the same bytes in the order in which kernels want them.
//!
//! A panel holds PANEL rows of a matrix. It is a sequence of panel blocks, one for each block of a row; a panel block
//! holds the blocks of all its rows, field by field. A field is cut into units, and the rows' units alternate: first
//! the first unit of every row, then the second of every row, and so on. So one vector load holds the same weights'
//! bytes of many rows, and each lane keeps its own row. Rows that fill the last panel up are zeros.
//!
//! Q6_K's fields are cut up and reordered, too (`fields`). Only the fifth bits of Q5_0 and Q5_1 are moved within their
//! bytes (`reorder_fifth_bits`).

use crate::quant::DType;

/// Rows of a panel: the lanes of the kernels' vectors.
pub const PANEL: usize = 16;

/// A part of every block: where it begins in the source block, its bytes, and how many of them stay together.
type Field = (usize, usize, usize);

/// The fields of a block, in packed order: scales, minimums, high bits, low bits. Quants go by four weights' bytes.
fn fields(dtype: DType) -> &'static [Field] {
    match dtype {
        DType::F32 => &[(0, 4, 4)],
        DType::F16 | DType::BF16 => &[(0, 2, 2)],
        DType::Q4_0 => &[(0, 2, 2), (2, 16, 4)],
        DType::Q4_1 => &[(0, 2, 2), (2, 2, 2), (4, 16, 4)],
        DType::Q5_0 => &[(0, 2, 2), (2, 4, 4), (6, 16, 4)],
        DType::Q5_1 => &[(0, 2, 2), (2, 2, 2), (4, 4, 4), (8, 16, 4)],
        DType::Q8_0 => &[(0, 2, 2), (2, 32, 4)],
        DType::Q4_K => &[(0, 2, 2), (2, 2, 2), (4, 12, 1), (16, 128, 4)],
        DType::Q5_K => &[(0, 2, 2), (2, 2, 2), (4, 12, 1), (16, 32, 4), (48, 128, 4)],
        // In the order of use: of each 128 columns the high bits of the first 16 of all quarters, the first 16 of the first
        // and third quarter, the same for the other 16, then the second and fourth quarter.
        DType::Q6_K => &[
            (208, 2, 2),
            (192, 16, 1),
            (128, 16, 4),
            (0, 16, 4),
            (144, 16, 4),
            (16, 16, 4),
            (32, 32, 4),
            (160, 16, 4),
            (64, 16, 4),
            (176, 16, 4),
            (80, 16, 4),
            (96, 32, 4),
        ],
    }
}

/// Bytes of a packed matrix, or None when `cols` is not a whole number of blocks or the size overflows.
pub fn packed_len(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
    dtype.row_bytes(cols)?.checked_mul(rows.checked_next_multiple_of(PANEL)?)
}

/// Packs at most PANEL rows into one panel.
///
/// # Panics
/// When `source` is not whole rows of `row_bytes`, or `panel` has another size than a panel of such rows.
pub fn pack_panel(dtype: DType, row_bytes: usize, source: &[u8], panel: &mut [u8]) {
    assert!(source.len().is_multiple_of(row_bytes) && source.len() <= panel.len());
    assert_eq!(panel.len(), PANEL * row_bytes);
    panel.fill(0);
    let block_bytes = dtype.block_bytes();
    let mut block = [0; 256];
    let block = &mut block[..block_bytes];
    for (row, bytes) in source.chunks_exact(row_bytes).enumerate() {
        for (source, packed) in bytes.chunks_exact(block_bytes).zip(panel.chunks_exact_mut(PANEL * block_bytes)) {
            block.copy_from_slice(source);
            reorder_fifth_bits(dtype, block, bit_to_packed);
            let mut at = 0;
            for (offset, len, unit) in fields(dtype) {
                for bytes in block[*offset..][..*len].chunks_exact(*unit) {
                    packed[at + row * unit..][..*unit].copy_from_slice(bytes);
                    at += PANEL * unit;
                }
            }
        }
    }
}

/// The block row that `pack_panel` took from `row`.
///
/// # Panics
/// When `panel` is not a panel of rows as long as `out`.
pub fn unpack_row(dtype: DType, panel: &[u8], row: usize, out: &mut [u8]) {
    assert_eq!(panel.len(), PANEL * out.len());
    let block_bytes = dtype.block_bytes();
    for (packed, block) in panel.chunks_exact(PANEL * block_bytes).zip(out.chunks_exact_mut(block_bytes)) {
        let mut at = 0;
        for (offset, len, unit) in fields(dtype) {
            for bytes in block[*offset..][..*len].chunks_exact_mut(*unit) {
                bytes.copy_from_slice(&packed[at + row * unit..][..*unit]);
                at += PANEL * unit;
            }
        }
        reorder_fifth_bits(dtype, block, bit_from_packed);
    }
}

/// Q5_0 and Q5_1 hold the fifth bits of 32 weights in one word, bit k for weight k. Packed, weight 4g + j has bit g of
/// byte j, so that one shift brings the bits of four weights, and of all rows, to the places where they are needed.
fn reorder_fifth_bits(dtype: DType, block: &mut [u8], to: fn(usize) -> usize) {
    let at = match dtype {
        DType::Q5_0 => 2,
        DType::Q5_1 => 4,
        _ => return,
    };
    let bytes: &mut [u8; 4] = block[at..].first_chunk_mut().expect("the block holds the word");
    let word = u32::from_le_bytes(*bytes);
    let reordered = (0..32).fold(0, |bits, i| bits | (word >> i & 1) << to(i));
    *bytes = reordered.to_le_bytes();
}

/// Where bit k of the source goes.
fn bit_to_packed(k: usize) -> usize {
    8 * (k % 4) + k / 4
}

/// Where a packed bit came from.
fn bit_from_packed(bit: usize) -> usize {
    4 * (bit % 8) + bit / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_back_every_row() {
        for dtype in DType::all() {
            for n_rows in [1, 7, PANEL] {
                let row_bytes = 3 * dtype.block_bytes();
                let source: Vec<u8> = (0..n_rows * row_bytes).map(|i| (i * 131 % 251) as u8).collect();
                let mut panel = vec![0xee; PANEL * row_bytes];
                pack_panel(dtype, row_bytes, &source, &mut panel);
                let mut row = vec![0; row_bytes];
                for (i, want) in source.chunks_exact(row_bytes).enumerate() {
                    unpack_row(dtype, &panel, i, &mut row);
                    assert_eq!(row, want, "{dtype:?} {i}");
                }
                for i in n_rows..PANEL {
                    unpack_row(dtype, &panel, i, &mut row);
                    assert!(row.iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    #[test]
    fn fields_cover_each_block_once() {
        for dtype in DType::all() {
            let mut seen = vec![0; dtype.block_bytes()];
            for (offset, len, unit) in fields(dtype) {
                assert!(len.is_multiple_of(*unit));
                seen[*offset..offset + len].iter_mut().for_each(|n| *n += 1);
            }
            assert!(seen.iter().all(|n| *n == 1), "{dtype:?}");
        }
    }

    #[test]
    fn quants_of_all_rows_lie_side_by_side() {
        let source: Vec<u8> = (0..PANEL).flat_map(|row| [[row as u8; 18], [100 + row as u8; 18]].concat()).collect();
        let mut panel = vec![0; PANEL * 36];
        pack_panel(DType::Q4_0, 36, &source, &mut panel);
        for row in 0..PANEL {
            assert_eq!(panel[2 * row..][..2], [row as u8; 2]);
            assert_eq!(panel[32 + 4 * row..][..4], [row as u8; 4]);
            assert_eq!(panel[288 + 32 + 192 + 4 * row..][..4], [100 + row as u8; 4]);
        }
        assert_eq!(packed_len(DType::Q4_0, 17, 64), Some(2 * PANEL * 36));
        assert_eq!(packed_len(DType::Q4_0, 17, 33), None);
    }

    /// A change here makes every .vindex folder that exists unreadable: raise VERSION in python/larql/vindex.py with it.
    #[test]
    fn the_layout_stays() {
        assert_eq!(DType::all().count(), LAYOUTS.len(), "a hash for each type");
        for (dtype, want) in DType::all().zip(LAYOUTS) {
            let row_bytes = 2 * dtype.block_bytes();
            let source: Vec<u8> = (0..PANEL * row_bytes).map(|i| (i * i % 253) as u8).collect();
            let mut panel = vec![0; source.len()];
            pack_panel(dtype, row_bytes, &source, &mut panel);
            // FNV-1a
            let hash =
                panel.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
            assert_eq!(hash, want, "{dtype:?}");
        }
    }

    /// Hashes of a packed panel of each type, in the order of `DType::all`.
    const LAYOUTS: [u64; 11] = [
        0x6bbc_8b7f_272c_4948,
        0x1989_ca1a_bacc_c051,
        0x1989_ca1a_bacc_c051,
        0xb8a7_d843_4171_bfd6,
        0x9737_9609_ac6c_eff8,
        0xe727_7fdb_9acc_b607,
        0x7cc9_c186_46a3_7aa8,
        0xe584_d7b0_2efb_44db,
        0xf8e9_ec31_1a22_43cc,
        0x9348_f97d_c4a2_b17a,
        0xd3c2_4bc0_4607_24bb,
    ];
}
