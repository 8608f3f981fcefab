//! The log of an agent or a worker: a line an event, and on every line where the
//! process stands ([`Place`]): node, rank, generation and step, as far as it has
//! them. What an event says itself about these goes before.
//!
//! `ELASTIC_LOG` chooses what is logged (`info`, `debug`, `actors=trace`),
//! `ELASTIC_LOG_FORMAT=json` writes JSON objects instead of text.

use std::fmt;

use actors::observer::Place;
use serde_json::{Map, Value};
use tracing::{Event, Subscriber, field};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields, MakeWriter,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// Environment variable that chooses what is logged.
pub const FILTER: &str = "ELASTIC_LOG";
/// Environment variable that chooses how: `text` or `json`.
pub const FORMAT: &str = "ELASTIC_LOG_FORMAT";

/// Sends this process's log there. A second call in one process changes nothing.
pub fn to<W>(writer: W)
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new("info"));
    let json = std::env::var(FORMAT).is_ok_and(|format| format.eq_ignore_ascii_case("json"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let _ = subscriber.event_format(Lines { json }).try_init();
}

struct Lines {
    json: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut said = Fields::default();
        event.record(&mut said);
        let metadata = event.metadata();
        self.line(writer, *metadata.level(), metadata.target(), said, &Place::now())
    }
}

impl Lines {
    fn line(
        &self,
        mut writer: Writer<'_>,
        level: tracing::Level,
        target: &str,
        mut said: Fields,
        place: &Place,
    ) -> fmt::Result {
        let mut fields = match serde_json::to_value(place) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        let message = said.0.remove(MESSAGE).unwrap_or_default();
        fields.extend(said.0);
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        if self.json {
            let head = [
                ("timestamp", time.into()),
                ("level", level.as_str().into()),
                ("target", target.into()),
                (MESSAGE, message),
            ];
            fields.extend(head.map(|(key, value)| (key.to_owned(), value)));
            return writeln!(writer, "{}", Value::Object(fields));
        }
        write!(writer, "{time} {level:>5}")?;
        for (key, value) in &fields {
            match value {
                Value::String(text) if !text.contains(char::is_whitespace) => {
                    write!(writer, " {key}={text}")?;
                }
                value => write!(writer, " {key}={value}")?,
            }
        }
        writeln!(writer, " {target}: {}", message.as_str().unwrap_or_default())
    }
}

const MESSAGE: &str = "message";

/// An event's own fields.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &field::Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl field::Visit for Fields {
    fn record_debug(&mut self, field: &field::Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &field::Field, value: &str) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &field::Field, value: u64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &field::Field, value: i64) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &field::Field, value: f64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &field::Field, value: bool) {
        self.put(field, value);
    }
}

#[cfg(test)]
mod tests {
    use job::{Generation, NodeId, Step};
    use serde_json::json;

    use super::*;

    fn place() -> Place {
        Place {
            node: NodeId::new("n1").ok(),
            rank: Some(2),
            generation: Some(Generation(3)),
            step: Some(Step(40)),
        }
    }

    /// The line of an event, behind its time.
    fn line(json: bool, place: &Place, said: &[(&str, Value)]) -> String {
        let said = said.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
        let mut text = String::new();
        Lines { json }
            .line(
                Writer::new(&mut text),
                tracing::Level::INFO,
                "actors",
                Fields(said.collect()),
                place,
            )
            .expect("a string takes everything");
        text
    }

    #[track_caller]
    fn check(place: &Place, said: &[(&str, Value)], expected: &str) {
        let text = line(false, place, said);
        let (_, text) = text.split_once(' ').expect("a time");
        assert_eq!(text, expected);
    }

    #[test]
    fn a_line_says_where_the_process_stands() {
        let message = ("message", json!("it ended"));
        check(
            &place(),
            std::slice::from_ref(&message),
            " INFO generation=3 node=n1 rank=2 step=40 actors: it ended\n",
        );
        check(&Place::default(), std::slice::from_ref(&message), " INFO actors: it ended\n");
        // The event knows better of what it speaks.
        check(
            &place(),
            &[message, ("generation", json!(2)), ("why", json!("a \"b\""))],
            " INFO generation=2 node=n1 rank=2 step=40 why=\"a \\\"b\\\"\" actors: it ended\n",
        );
    }

    #[test]
    fn a_line_is_one_json_object() {
        let text = line(true, &place(), &[("message", json!("two\nlines")), ("pid", json!(7))]);
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        let mut value: Value = serde_json::from_str(&text).expect("JSON");
        assert!(value["timestamp"].take().is_string(), "{text}");
        let expected = json!({
            "timestamp": null, "level": "INFO", "target": "actors", "message": "two\nlines",
            "node": "n1", "rank": 2, "generation": 3, "step": 40, "pid": 7,
        });
        assert_eq!(value, expected);
    }
}
