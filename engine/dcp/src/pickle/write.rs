//! Emits protocol 2. Callers write values in stream order; globals and the
//! strings of an index are remembered and referred to.

use std::collections::HashMap;

use crate::value::Value;

use super::Error;

/// A pickle in the making.
#[derive(Default)]
pub(crate) struct Writer {
    out: Vec<u8>,
    memo: HashMap<String, u32>,
    next: u32,
    /// The key being looked up: an index asks a million times.
    key: String,
}

impl Writer {
    /// Starts a pickle.
    pub(crate) fn new() -> Self {
        Self { out: vec![0x80, 2], ..Self::default() }
    }

    /// Ends it.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// One opcode without arguments.
    pub(crate) fn op(&mut self, opcode: u8) {
        self.out.push(opcode);
    }

    /// `None`
    pub(crate) fn none(&mut self) {
        self.op(b'N');
    }

    /// `True` or `False`
    pub(crate) fn bool(&mut self, value: bool) {
        self.op(if value { 0x88 } else { 0x89 });
    }

    /// An integer in its shortest form.
    pub(crate) fn int(&mut self, value: i64) {
        if let Ok(small) = u8::try_from(value) {
            self.out.extend([b'K', small]);
        } else if let Ok(small) = u16::try_from(value) {
            self.op(b'M');
            self.out.extend(small.to_le_bytes());
        } else if let Ok(small) = i32::try_from(value) {
            self.op(b'J');
            self.out.extend(small.to_le_bytes());
        } else {
            // No 64-bit integer outside i32 fits in fewer than 5 bytes, and
            // torch accepts the untrimmed form.
            self.out.extend([0x8a, 8]);
            self.out.extend(value.to_le_bytes());
        }
    }

    /// An unsigned integer: sizes and offsets.
    pub(crate) fn uint(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                self.out.extend([0x8a, 9]);
                self.out.extend(value.to_le_bytes());
                self.op(0);
            }
        }
    }

    /// Text, written out.
    pub(crate) fn text(&mut self, text: &str) -> Result<(), Error> {
        let length = u32::try_from(text.len()).map_err(|_| Error::Unbounded("4 GiB of text"))?;
        self.op(b'X');
        self.out.extend(length.to_le_bytes());
        self.out.extend(text.as_bytes());
        Ok(())
    }

    /// Text that will come again: written out once.
    pub(crate) fn name(&mut self, text: &str) -> Result<(), Error> {
        // The prefix keeps texts apart from the memo's globals.
        self.remembered(&["'", text], |pickle| pickle.text(text))
    }

    /// A global, by module and name.
    pub(crate) fn global(&mut self, module: &str, name: &str) -> Result<(), Error> {
        let parts = [module, "\n", name, "\n"];
        self.remembered(&parts, |pickle| {
            pickle.op(b'c');
            parts.iter().for_each(|part| pickle.out.extend(part.as_bytes()));
            Ok(())
        })
    }

    /// Writes a value the first time, a reference to it afterwards. The value
    /// must be complete when `write` returns and must not change later. Its key
    /// is the parts in a row.
    pub(crate) fn remembered(
        &mut self,
        key: &[&str],
        write: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.key.clear();
        key.iter().for_each(|part| self.key.push_str(part));
        if let Some(&index) = self.memo.get(&self.key) {
            self.indexed(index, b'h', b'j');
            return Ok(());
        }
        write(self)?;
        let index = self.next;
        self.next += 1;
        self.indexed(index, b'q', b'r');
        self.memo.insert(key.concat(), index);
        Ok(())
    }

    fn indexed(&mut self, index: u32, short: u8, long: u8) {
        if let Ok(index) = u8::try_from(index) {
            self.out.extend([short, index]);
        } else {
            self.op(long);
            self.out.extend(index.to_le_bytes());
        }
    }

    /// A tuple of what `items` writes.
    pub(crate) fn tuple(
        &mut self,
        items: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.op(b'(');
        items(self)?;
        self.op(b't');
        Ok(())
    }

    /// A list of what `items` writes.
    pub(crate) fn list(
        &mut self,
        items: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.extend([b']', b'(']);
        items(self)?;
        self.op(b'e');
        Ok(())
    }

    /// A dict of the keys and values that `pairs` writes in turn.
    pub(crate) fn dict(
        &mut self,
        pairs: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.extend([b'}', b'(']);
        pairs(self)?;
        self.op(b'u');
        Ok(())
    }

    /// `module.name(*args)`.
    pub(crate) fn call(
        &mut self,
        module: &str,
        name: &str,
        args: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.global(module, name)?;
        self.tuple(args)?;
        self.op(b'R');
        Ok(())
    }

    /// A new `module.name` without state.
    pub(crate) fn new_object(&mut self, module: &str, name: &str) -> Result<(), Error> {
        self.global(module, name)?;
        self.out.extend([b')', 0x81]);
        Ok(())
    }

    /// A tuple of unsigned integers.
    pub(crate) fn uints(&mut self, values: &[u64]) -> Result<(), Error> {
        self.tuple(|p| {
            values.iter().for_each(|&value| p.uint(value));
            Ok(())
        })
    }

    /// Any value that is not opaque.
    pub(crate) fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value {
            Value::None => self.none(),
            Value::Bool(value) => self.bool(*value),
            Value::Int(value) => self.int(*value),
            Value::BigInt(bytes) => {
                // The safe loader knows only the form with one byte of length.
                let length = u8::try_from(bytes.len())
                    .map_err(|_| Error::Unbounded("255 bytes of digits"))?;
                self.out.extend([0x8a, length]);
                self.out.extend(bytes);
            }
            Value::Float(value) => {
                self.op(b'G');
                self.out.extend(value.to_be_bytes());
            }
            Value::Str(text) => self.text(text)?,
            Value::Bytes(bytes) => self.call("_codecs", "encode", |p| {
                p.text(&bytes.iter().map(|&byte| char::from(byte)).collect::<String>())?;
                p.text("latin1")
            })?,
            Value::List(items) => self.list(|p| items.iter().try_for_each(|item| p.value(item)))?,
            Value::Tuple(items) => {
                self.tuple(|p| items.iter().try_for_each(|item| p.value(item)))?;
            }
            Value::Dict(pairs) => self.dict(|p| {
                pairs.iter().try_for_each(|(key, value)| p.value(key).and_then(|()| p.value(value)))
            })?,
            Value::Opaque(class) => return Err(Error::Opaque(class.clone())),
        }
        Ok(())
    }
}
