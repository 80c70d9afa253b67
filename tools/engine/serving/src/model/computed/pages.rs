//! The content of the KV cache: two tensors `[slots, kv_heads × head_dim]` for each layer, written
//! in place. A slot holds one token. Block `b` has the slots from `b × block_tokens` on.

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::model::{self, KvCache, ModelShape, fail};
use crate::schedule::Room;

pub struct Pages {
    layers: Vec<(Tensor, Tensor)>,
    width: usize,
    block_tokens: usize,
    blocks: usize,
    device: Device,
}

impl Pages {
    /// Makes an empty cache.
    pub fn new(shape: &ModelShape, room: Room, device: &Device) -> Result<Self> {
        let (blocks, block_tokens) = (room.blocks as usize, room.block_tokens as usize);
        let width = shape.kv_width();
        let zeros = || Tensor::zeros((blocks * block_tokens, width), DType::F32, device);
        let layers = (0..shape.layers).map(|_| Ok((zeros()?, zeros()?))).collect::<Result<_>>()?;
        Ok(Self { layers, width, block_tokens, blocks, device: device.clone() })
    }

    pub fn layer(&self, layer: usize) -> (&Tensor, &Tensor) {
        let (keys, values) = &self.layers[layer];
        (keys, values)
    }

    /// Writes rows into slots.
    /// Fails if a slot does not exist.
    pub fn write(&self, layer: usize, slots: &[u32], keys: &Tensor, values: &Tensor) -> Result<()> {
        let (to_keys, to_values) = &self.layers[layer];
        let index = Tensor::from_slice(slots, (slots.len(), 1), &self.device)?
            .expand((slots.len(), self.width))?
            .contiguous()?;
        to_keys.scatter_set(&index, &keys.contiguous()?, 0)?;
        to_values.scatter_set(&index, &values.contiguous()?, 0)
    }

    /// Returns the slots of `tokens` tokens from `first` on.
    fn slots(&self, blocks: &[u32], first: usize, tokens: usize) -> Result<Vec<u32>> {
        if let Some(block) = blocks.iter().find(|block| **block as usize >= self.blocks) {
            bail!("there is no block {block}");
        }
        let size = self.block_tokens;
        if tokens == 0 || first.saturating_add(tokens) > blocks.len() * size {
            bail!("{} blocks do not hold {tokens} tokens from {first} on", blocks.len());
        }
        Ok((first..first + tokens)
            .map(|token| blocks[token / size] * size as u32 + (token % size) as u32)
            .collect())
    }
}

impl KvCache for Pages {
    fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    fn token_bytes(&self) -> usize {
        2 * self.width * size_of::<f32>()
    }

    fn export(
        &self,
        layer: usize,
        blocks: &[u32],
        first: usize,
        tokens: usize,
    ) -> model::Result<Vec<u8>> {
        let slots = self.slots(blocks, first, tokens)?;
        let index = Tensor::from_vec(slots, tokens, &self.device)?;
        let (keys, values) = self.layer(layer);
        let mut bytes = Vec::with_capacity(tokens * self.token_bytes());
        for tensor in [keys, values] {
            let numbers: Vec<f32> = tensor.index_select(&index, 0)?.flatten_all()?.to_vec1()?;
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        Ok(bytes)
    }

    fn import(
        &self,
        layer: usize,
        blocks: &[u32],
        first: usize,
        bytes: &[u8],
    ) -> model::Result<usize> {
        let tokens = bytes.len() / self.token_bytes();
        if tokens * self.token_bytes() != bytes.len() || layer >= self.layers.len() {
            fail!("{} bytes for layer {layer} are no whole tokens of one", bytes.len());
        }
        let slots = self.slots(blocks, first, tokens)?;
        let numbers: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
        let (keys, values) = numbers.split_at(tokens * self.width);
        let tensor = |part: &[f32]| Tensor::from_slice(part, (tokens, self.width), &self.device);
        self.write(layer, &slots, &tensor(keys)?, &tensor(values)?)?;
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::tests::tiny;

    #[test]
    fn what_is_exported_comes_back_to_the_bit_in_other_blocks() {
        let shape = tiny(false);
        let pages = Pages::new(&shape, Room { blocks: 6, block_tokens: 4 }, &Device::Cpu).unwrap();
        let rows = Tensor::randn(0_f32, 1.0, (6, 32), &Device::Cpu).unwrap();
        let values = Tensor::randn(0_f32, 1.0, (6, 32), &Device::Cpu).unwrap();
        pages.write(1, &[8, 9, 10, 11, 20, 21], &rows, &values).unwrap();
        let bytes = pages.export(1, &[2, 5], 0, 6).unwrap();
        assert_eq!(bytes.len(), 6 * pages.token_bytes());
        assert_eq!(pages.import(1, &[0, 3], 0, &bytes).unwrap(), 6);
        assert_eq!(pages.export(1, &[0, 3], 0, 6).unwrap(), bytes);
        // The two pieces do not end at a block's end.
        let parts = [(0, 3), (3, 3)]
            .map(|(from, count)| (from, pages.export(1, &[2, 5], from, count).unwrap()));
        for (from, part) in &parts {
            pages.import(1, &[4, 1], *from, part).unwrap();
        }
        assert_eq!(pages.export(1, &[4, 1], 0, 6).unwrap(), bytes);
        assert!(pages.export(1, &[7], 0, 1).is_err());
        assert!(pages.export(1, &[0], 2, 3).is_err());
        assert!(pages.import(1, &[0], 0, &bytes).is_err());
        assert!(pages.import(9, &[0, 1], 0, &bytes).is_err());
        assert!(pages.import(1, &[0, 1], 0, &bytes[1..]).is_err());
    }
}
