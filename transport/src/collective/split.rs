//! Sub-communicators: meshes of their own that are split off a mesh.
//!
//! Each rank opens one port for each partition, all ports are told in a single
//! exchange, and then every group connects as a mesh does. So a sub-communicator
//! shares no connection with another one, and the keys differ.

use std::{net::SocketAddr, time::Instant};

use super::{
    Communicator, Error, HostMesh, Listener, MeshSpec, Partition, Solo, frame::Op, groups::place,
};

/// Ports told in one exchange, at most.
const PARTITIONS: usize = 64;

impl HostMesh {
    pub(super) fn split_off(
        &mut self,
        partitions: &[Partition],
        deadline: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error> {
        let (rank, size) = (self.rank(), self.size());
        if partitions.len() > PARTITIONS {
            let many = partitions.len();
            return Err(Error::refused(format!("{many} partitions at once, over {PARTITIONS}")));
        }
        let places: Vec<_> =
            partitions.iter().map(|of| place(of, rank, size)).collect::<Result<_, _>>()?;
        let bind = SocketAddr::new(self.origin.bind, 0);
        let shares_memory = self.origin.shares_memory;
        let open = |_| {
            let listener = Listener::bind(bind)?;
            Ok(if shares_memory { listener } else { listener.over_tcp_only() })
        };
        let listeners: Vec<_> = partitions.iter().map(open).collect::<Result<_, Error>>()?;
        let ports: Vec<u8> =
            listeners.iter().flat_map(|own| own.local_addr().port().to_le_bytes()).collect();
        let all = self.gather_all(Op::Split, &ports, 2 * PARTITIONS, deadline)?;
        let port = |rank: usize, at: usize| match all[rank].as_chunks::<2>().0.get(at) {
            Some(port) if all[rank].len() == ports.len() => Ok(u16::from_le_bytes(*port)),
            _ => Err(Error::Protocol {
                rank: self.origin.names[rank],
                detail: format!("it splits the mesh differently than rank {}", self.rank()),
            }),
        };
        let mut children: Vec<Box<dyn Communicator>> = Vec::with_capacity(partitions.len());
        for (at, (listener, (group, rank))) in listeners.iter().zip(places).enumerate() {
            let number = self.origin.children + at as u64;
            if group.len() == 1 {
                children.push(Box::new(Solo::new(self.token())));
                continue;
            }
            let mut addresses = Vec::with_capacity(group.len());
            for &member in group {
                let address = self.origin.addresses[member];
                addresses.push(SocketAddr::new(address.ip(), port(member, at)?));
            }
            let key = self.origin.key.child(number, group[0]);
            let spec = MeshSpec { token: self.token(), key: key.0, rank, addresses };
            let names: Vec<_> = group.iter().map(|&member| self.origin.names[member]).collect();
            let lingering = self.lingering.clone();
            let mesh = listener.connect_as(spec, names, lingering, deadline, &self.wire.abort)?;
            children.push(Box::new(mesh));
        }
        self.origin.children += partitions.len() as u64;
        Ok(children)
    }
}
