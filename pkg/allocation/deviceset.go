package allocation

import "hash/maphash"

// DeviceSet represents a set of device IDs in this process. Equal sets have equal values, whatever the order of the IDs. A pod
// can have many thousands of IDs, so the IDs themselves aren't kept: the value is their number and the sums of two hashes of each
// ID. Two different sets can have the same value by chance only.
type DeviceSet [3]uint64

var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

// NewDeviceSet returns the set of these IDs.
func NewDeviceSet(ids []string) DeviceSet {
	set := DeviceSet{uint64(len(ids))}
	for _, id := range ids {
		set[1] += maphash.String(seeds[0], id)
		set[2] += maphash.String(seeds[1], id)
	}
	return set
}
