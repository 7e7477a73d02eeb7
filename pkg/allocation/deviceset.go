package allocation

// DeviceSet represents a set of device IDs. Equal sets have equal values, whatever the order of the IDs. A pod can have many
// thousands of IDs, so the IDs themselves aren't kept: the value is their number and the sums of two hashes of each ID. Only
// this plugin chooses IDs, so two different sets can have the same value by chance only.
type DeviceSet [3]uint64

// NewDeviceSet returns the set of these IDs.
func NewDeviceSet(ids []string) DeviceSet {
	set := DeviceSet{uint64(len(ids))}
	for _, id := range ids {
		// FNV-1a, with its bits mixed as in SplitMix64 so that sums don't cancel out.
		hash := uint64(14695981039346656037)
		for i := range len(id) {
			hash = (hash ^ uint64(id[i])) * 1099511628211
		}
		set[1] += mix(hash)
		set[2] += mix(hash + 0x9e3779b97f4a7c15)
	}
	return set
}

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
