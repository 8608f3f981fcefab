//! The pickle machine.
//!
//! Nodes live in an arena and refer to each other by number, so that shared
//! references cost nothing and cyclic ones cannot leak; whoever walks them
//! bounds the walk.

use std::collections::HashMap;

use super::Error;

/// A node of a [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id(u32);

/// One unpickled value, borrowing from the input.
#[derive(Debug)]
pub(crate) enum Node<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// Little-endian two's complement, more than 8 bytes.
    Big(&'a [u8]),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class or function, by name.
    Global {
        module: &'a str,
        name: &'a str,
    },
    /// `class(*args)` or `function(*args)`, never called, with the state that
    /// BUILD would have given it.
    Object {
        callable: Id,
        args: Id,
        state: Option<Id>,
    },
    /// A reference to something outside the pickle: a tensor's storage.
    Persistent(Id),
}

/// An unpickled value: an arena of nodes and the root.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    /// Where the instruction of each node is.
    positions: Vec<u32>,
    pub(crate) root: Id,
    /// Bytes of the input, from which walks take their bounds.
    pub(crate) input: usize,
}

impl<'a> Pickle<'a> {
    /// Runs a whole pickle.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let mut machine = Machine { bytes, at: 0, ..Machine::default() };
        let root = machine.run()?;
        if machine.at != bytes.len() {
            return Err(Error::Trailing(machine.at));
        }
        let Machine { nodes, positions, .. } = machine;
        Ok(Self { nodes, positions, root, input: bytes.len() })
    }

    /// How many nodes the input made: never more than it has bytes.
    #[cfg(test)]
    pub(crate) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Where in the input a node was made.
    pub(crate) fn position(&self, id: Id) -> usize {
        self.positions[id.0 as usize] as usize
    }

    /// The node of an id of this pickle.
    pub(crate) fn node(&self, id: Id) -> &Node<'a> {
        &self.nodes[id.0 as usize]
    }
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the present instruction begins.
    opcode_at: usize,
    nodes: Vec<Node<'a>>,
    positions: Vec<u32>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Id, Error> {
        loop {
            let at = self.at;
            self.opcode_at = at;
            let opcode = self.take(1)?[0];
            if opcode == b'.' {
                return self.pop().ok_or(Error::Operand { opcode, at });
            }
            self.step(opcode, at)?.ok_or(Error::Operand { opcode, at })?;
        }
    }

    /// One instruction. `Ok(None)`: its operands are missing or wrong.
    fn step(&mut self, opcode: u8, at: usize) -> Result<Option<()>, Error> {
        match opcode {
            0x80 => match self.take(1)?[0] {
                2..=5 => {}
                other => return Err(Error::Protocol(other)),
            },
            0x95 => drop(self.take(8)?), // FRAME: only a hint for buffered reading
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'K' => {
                let value = self.take(1)?[0];
                self.push(Node::Int(value.into()));
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Node::Int(value.into()));
            }
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Node::Int(value.into()));
            }
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                self.push(Node::Float(value));
            }
            0x8c => self.text(1)?,
            b'X' => self.text(4)?,
            0x8d => self.text(8)?,
            b'C' => self.blob(1)?,
            b'B' => self.blob(4)?,
            0x8e | 0x96 => self.blob(8)?,
            b'(' => self.marks.push(self.stack.len()),
            b')' => self.push(Node::Tuple(Vec::new())),
            b']' => self.push(Node::List(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            0x85..=0x87 => return Ok(self.short_tuple(usize::from(opcode - 0x84))),
            b't' => return Ok(self.pop_mark().map(|items| self.push(Node::Tuple(items)))),
            b'a' => return Ok(self.pop().and_then(|item| self.append(&[item]))),
            b'e' => return Ok(self.pop_mark().and_then(|items| self.append(&items))),
            b's' => return Ok(self.set_item()),
            b'u' => return Ok(self.pop_mark().and_then(|items| self.set_items(&items))),
            0x94 => {
                let next = self.memo.len() as u32;
                return Ok(self.memoize(next));
            }
            b'q' => {
                let index = self.take(1)?[0];
                return Ok(self.memoize(index.into()));
            }
            b'r' => {
                let index = u32::from_le_bytes(self.array()?);
                return Ok(self.memoize(index));
            }
            b'h' => {
                let index = self.take(1)?[0];
                return Ok(self.recall(index.into()));
            }
            b'j' => {
                let index = u32::from_le_bytes(self.array()?);
                return Ok(self.recall(index));
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Node::Global { module, name });
            }
            0x93 => return Ok(self.stack_global()),
            b'R' | 0x81 => return Ok(self.object()),
            b'b' => return Ok(self.build()),
            b'Q' => return Ok(self.pop().map(|id| self.push(Node::Persistent(id)))),
            opcode => return Err(Error::Opcode { opcode, at }),
        }
        Ok(Some(()))
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let end = self.at.checked_add(n).ok_or(Error::Short(self.at))?;
        let bytes = self.bytes.get(self.at..end).ok_or(Error::Short(self.at))?;
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let at = self.at;
        self.take(N)?.try_into().map_err(|_| Error::Short(at))
    }

    /// Bytes behind a length of `width` bytes.
    fn counted(&mut self, width: usize) -> Result<&'a [u8], Error> {
        let at = self.at;
        let mut length = [0; 8];
        length[..width].copy_from_slice(self.take(width)?);
        let length = usize::try_from(u64::from_le_bytes(length)).map_err(|_| Error::Short(at))?;
        self.take(length)
    }

    fn text(&mut self, width: usize) -> Result<(), Error> {
        let at = self.at;
        let text = std::str::from_utf8(self.counted(width)?).map_err(|_| Error::Text(at))?;
        self.push(Node::Str(text));
        Ok(())
    }

    fn blob(&mut self, width: usize) -> Result<(), Error> {
        let bytes = self.counted(width)?;
        self.push(Node::Bytes(bytes));
        Ok(())
    }

    fn long(&mut self, width: usize) -> Result<(), Error> {
        let bytes = self.counted(width)?;
        let negative = bytes.last().is_some_and(|&top| top >= 0x80);
        self.push(if bytes.len() <= 8 {
            let mut wide = [if negative { 0xff } else { 0 }; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            Node::Int(i64::from_le_bytes(wide))
        } else {
            Node::Big(bytes)
        });
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str, Error> {
        let at = self.at;
        let rest = &self.bytes[at..];
        let length = rest.iter().position(|&b| b == b'\n').ok_or(Error::Short(at))?;
        self.at += length + 1;
        std::str::from_utf8(&rest[..length]).map_err(|_| Error::Text(at))
    }

    fn push(&mut self, node: Node<'a>) {
        // An input of 4 GiB would be needed for more nodes than a u32 counts,
        // and no caller accepts one.
        let id = Id(self.nodes.len() as u32);
        self.nodes.push(node);
        self.positions.push(self.opcode_at as u32);
        self.stack.push(id);
    }

    /// Pops one value, never one below the innermost mark.
    fn pop(&mut self) -> Option<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() > floor { self.stack.pop() } else { None }
    }

    fn pop_mark(&mut self) -> Option<Vec<Id>> {
        let mark = self.marks.pop()?;
        Some(self.stack.split_off(mark))
    }

    fn top(&mut self) -> Option<&mut Node<'a>> {
        let id = *self.stack.last()?;
        self.nodes.get_mut(id.0 as usize)
    }

    fn short_tuple(&mut self, n: usize) -> Option<()> {
        let mut items = Vec::with_capacity(n);
        for _ in 0..n {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Node::Tuple(items));
        Some(())
    }

    fn append(&mut self, items: &[Id]) -> Option<()> {
        match self.top()? {
            Node::List(list) => list.extend_from_slice(items),
            // A subclass of list that we keep opaque.
            Node::Object { .. } => {}
            _ => return None,
        }
        Some(())
    }

    fn set_item(&mut self) -> Option<()> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.set_items(&[key, value])
    }

    fn set_items(&mut self, items: &[Id]) -> Option<()> {
        let (pairs, []) = items.as_chunks::<2>() else { return None };
        match self.top()? {
            Node::Dict(dict) => dict.extend(pairs.iter().map(|&[key, value]| (key, value))),
            // A subclass of dict that we keep opaque.
            Node::Object { .. } => {}
            _ => return None,
        }
        Some(())
    }

    fn memoize(&mut self, index: u32) -> Option<()> {
        self.memo.insert(index, *self.stack.last()?);
        Some(())
    }

    fn recall(&mut self, index: u32) -> Option<()> {
        self.stack.push(*self.memo.get(&index)?);
        Some(())
    }

    fn stack_global(&mut self) -> Option<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        match (&self.nodes[module.0 as usize], &self.nodes[name.0 as usize]) {
            (&Node::Str(module), &Node::Str(name)) => self.push(Node::Global { module, name }),
            _ => return None,
        }
        Some(())
    }

    fn object(&mut self) -> Option<()> {
        let (args, callable) = (self.pop()?, self.pop()?);
        let Node::Tuple(items) = &self.nodes[args.0 as usize] else { return None };
        let ordered = matches!(
            self.nodes[callable.0 as usize],
            Node::Global { module: "collections", name: "OrderedDict" }
        );
        self.push(if ordered && items.is_empty() {
            Node::Dict(Vec::new())
        } else {
            Node::Object { callable, args, state: None }
        });
        Some(())
    }

    fn build(&mut self) -> Option<()> {
        let given = self.pop()?;
        match self.top()? {
            Node::Object { state, .. } => *state = Some(given),
            // An OrderedDict with attributes of its own.
            Node::Dict(_) => {}
            _ => return None,
        }
        Some(())
    }
}
