package redlock

// Outstanding tells how much the driver keeps: requests that wait for nodes, owners, releases that are tried again.
func (d *Driver) Outstanding() (queued, owners, owed int) {
	for _, n := range d.nodes {
		n.mu.Lock()
		queued += len(n.queue)
		n.mu.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return queued, len(d.owners), d.owed
}

// MaxQueue bounds the requests that wait for a node.
const MaxQueue = maxQueue
