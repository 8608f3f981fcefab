//! `elastic token create|list|revoke`: who may join, from now on.

use actors::agent::{Request, Response, TokenLine, TokenRequest};

use super::{
    fail,
    job::ask_any,
    print::{print, print_line},
};
use crate::{cli::TokenCommand, exit::Exit};

pub(super) fn run(command: &TokenCommand) -> Exit {
    let (target, request) = match command {
        TokenCommand::Create { ttl, target } => (target, TokenRequest::Create { ttl_s: *ttl }),
        TokenCommand::List { target } => (target, TokenRequest::List),
        TokenCommand::Revoke { id, target } => (target, TokenRequest::Revoke { id: id.clone() }),
    };
    match ask_any(&target.dump_folder, &Request::Token(request)) {
        Ok(Response::Accepted(text)) => {
            print_line(&text);
            Exit::Finished
        }
        Ok(Response::Tokens(tokens)) => {
            print(&tokens.iter().map(line).collect::<Vec<_>>().join("\n"));
            Exit::Finished
        }
        Ok(Response::Refused(why)) => fail(Exit::Failed, &why),
        Ok(Response::Status(_)) => fail(Exit::Failed, &"the agent answered with something else"),
        Err(why) => fail(Exit::NoJob, &why),
    }
}

fn line(token: &TokenLine) -> String {
    let expires = match (token.expires, token.valid) {
        (None, _) => "never expires".to_owned(),
        (Some(at), true) => format!("expires {} s after it was made", life(token, at.0)),
        (Some(at), false) => format!("expired {} s after it was made", life(token, at.0)),
    };
    format!("{:<10}  {expires}", token.id)
}

fn life(token: &TokenLine, expires: u64) -> u64 {
    expires.saturating_sub(token.made.0) / 1_000_000
}
