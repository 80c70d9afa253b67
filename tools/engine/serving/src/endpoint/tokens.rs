//! Conversion of text to tokens. Each byte of UTF-8 is a token, and four marks follow the 256
//! bytes. This is reversible and needs no vocabulary file, and a model with random weights gains
//! nothing from a better one. Tokens of a larger vocabulary are shown as `<t1234>`.

pub const BEGIN: u32 = 256;
pub const END: u32 = 257;
pub const VOCAB_MIN: usize = 260;

pub fn encode(text: &str) -> Vec<u32> {
    std::iter::once(BEGIN).chain(text.bytes().map(u32::from)).collect()
}

/// A converter of tokens to text. It returns a character when the last byte of it has arrived.
#[derive(Debug, Default)]
pub struct TextDecoder {
    bytes: Vec<u8>,
}

impl TextDecoder {
    /// Adds a token and returns the text that is complete.
    pub fn push(&mut self, token: u32) -> String {
        match token {
            0..=255 => self.bytes.push(token as u8),
            256..=259 => {}
            _ => {
                let mut shown = self.finish();
                shown.push_str(&format!("<t{token}>"));
                return shown;
            }
        }
        self.take(false)
    }

    pub fn finish(&mut self) -> String {
        self.take(true)
    }

    fn take(&mut self, all: bool) -> String {
        let bytes = std::mem::take(&mut self.bytes);
        let (mut shown, mut chunks) = (String::new(), bytes.utf8_chunks().peekable());
        while let Some(chunk) = chunks.next() {
            shown.push_str(chunk.valid());
            let bad = std::str::from_utf8(chunk.invalid());
            let Err(error) = bad else { continue };
            if !all && chunks.peek().is_none() && error.error_len().is_none() {
                // These bytes begin a character that later tokens may complete.
                self.bytes = chunk.invalid().to_vec();
            } else {
                shown.push(char::REPLACEMENT_CHARACTER);
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_comes_back_as_it_was(text in any::<String>()) {
            let mut decoder = TextDecoder::default();
            let tokens = encode(&text).into_iter();
            let mut back: String = tokens.map(|token| decoder.push(token)).collect();
            back.push_str(&decoder.finish());
            prop_assert_eq!(back, text);
        }

        #[test]
        fn any_tokens_give_some_text(tokens in prop::collection::vec(0..400_u32, 0..50)) {
            let mut decoder = TextDecoder::default();
            tokens.into_iter().for_each(|token| drop(decoder.push(token)));
            decoder.finish();
            prop_assert!(decoder.bytes.is_empty());
        }
    }

    #[test]
    fn half_a_character_waits_and_a_lone_half_is_replaced() {
        let mut decoder = TextDecoder::default();
        assert_eq!(decoder.push(0xc3), "");
        assert_eq!(decoder.push(0xa4), "ä");
        assert_eq!(decoder.push(0xc3), "");
        assert_eq!(decoder.push(u32::from(b'x')), "\u{fffd}x");
        assert_eq!(decoder.push(0xc3), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
        assert_eq!(decoder.push(1234), "<t1234>");
    }
}
