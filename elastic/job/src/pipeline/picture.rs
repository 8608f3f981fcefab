//! A timeline as text and as SVG.

use std::fmt::Write;

use super::{Action, Pass, Slot, Timeline};

/// Pixels of a unit of time and of a rank.
const UNIT: u32 = 22;
const ROW: u32 = 26;
/// Pixels left of the first unit.
const MARGIN: u32 = 64;

impl Timeline {
    /// One line for each rank, one column for each unit of time: the micro-batch
    /// behind a letter for the pass (F, B, I, W), `=` while it goes on, `·` while
    /// waiting, and a `'` for each chunk after the first.
    #[must_use]
    pub fn text(&self) -> String {
        let width = 2
            + self.micro_batches.saturating_sub(1).max(1).ilog10() as usize
            + (self.chunks - 1) as usize;
        let mut out = String::new();
        for (rank, slots) in self.ranks.iter().enumerate() {
            let _ = write!(out, "rank {rank:<2} ");
            let mut at = 0;
            for Slot { start, action } in slots {
                for _ in at..*start {
                    let _ = write!(out, " {:<width$}", "·");
                }
                let _ = write!(out, " {:<width$}", label(*action));
                for _ in 1..action.pass.length() {
                    let _ = write!(out, " {:<width$}", "=");
                }
                at = action.end(*start);
            }
            while out.ends_with(' ') {
                out.pop();
            }
            out.push('\n');
        }
        out
    }

    /// A drawing of the same.
    #[must_use]
    pub fn svg(&self) -> String {
        let (width, height) = (MARGIN + self.span() * UNIT + 8, self.stages * ROW + 8);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             font-family=\"monospace\" font-size=\"10\">\n"
        );
        for (rank, slots) in self.ranks.iter().enumerate() {
            let y = 4 + rank as u32 * ROW;
            let _ = writeln!(out, "<text x=\"4\" y=\"{}\">rank {rank}</text>", y + 15);
            for Slot { start, action } in slots {
                let (x, length) = (MARGIN + start * UNIT, action.pass.length() * UNIT - 2);
                let colour = colour(*action);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{length}\" height=\"{}\" fill=\"{colour}\"/>\
                     <text x=\"{}\" y=\"{}\">{}</text>",
                    ROW - 4,
                    x + 2,
                    y + 15,
                    label(*action)
                );
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

fn label(Action { pass, chunk, micro_batch }: Action) -> String {
    let letter = match pass {
        Pass::Forward => 'F',
        Pass::Backward => 'B',
        Pass::Input => 'I',
        Pass::Weight => 'W',
    };
    format!("{letter}{micro_batch}{}", "'".repeat(chunk as usize))
}

fn colour(action: Action) -> &'static str {
    match (action.pass, action.chunk % 2) {
        (Pass::Forward, 0) => "#9ecae1",
        (Pass::Forward, _) => "#6baed6",
        (Pass::Backward, 0) => "#fdae6b",
        (Pass::Backward, _) => "#fd8d3c",
        (Pass::Input, _) => "#a1d99b",
        (Pass::Weight, _) => "#bcbddc",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Schedule;

    #[test]
    fn a_timeline_reads_as_published() {
        let text = Schedule::OneForwardOneBackward.timeline(2, 1, 3).text();
        assert_eq!(
            text,
            "rank 0   F0 F1 ·  ·  B0 =  F2 B1 =  ·  B2 =\nrank 1   ·  F0 B0 =  F1 B1 =  F2 B2 =\n"
        );
    }

    #[test]
    fn a_drawing_has_a_box_for_each_action() {
        let timeline = Schedule::Interleaved.timeline(2, 2, 4);
        assert_eq!(timeline.svg().matches("<rect").count(), 2 * 2 * 2 * 4);
    }
}
