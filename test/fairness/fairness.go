// Package fairness says what tenants of a cluster deserve, the slow obvious way, for tests and benchmarks.
package fairness

// Restriction says which nodes a tenant's pods can use.
type Restriction int

// The restrictions.
const (
	// Anywhere: all nodes.
	Anywhere Restriction = iota
	// FirstPool and SecondPool: the nodes with that label.
	FirstPool
	SecondPool
	// ByCPU: all nodes, whose CPUs suffice for a part of their memory only.
	ByCPU
)

// Pools are the parts of the cluster: the nodes of FirstPool, those of SecondPool, and the others.
const Pools = 3

// Room is the GPU memory of the cluster, by pool, and how much of it pods restricted by CPU can use.
type Room struct{ Memory, CPU [Pools]int64 }

// Claim is what a tenant is entitled to and asks for.
type Claim struct {
	Weight, Demand int64
	Restriction    Restriction
}

// Shares divides the room among the claims, unit by unit: the next unit goes to the claim with the least in proportion to its
// weight that can use one more. It shares no arithmetic with the programs under test.
func Shares(r Room, claims []Claim) []int64 {
	shares, full := make([]int64, len(claims)), make([]bool, len(claims))
	var used [ByCPU + 1]int64
	for {
		next := -1
		for i, c := range claims {
			// shares[i]/weight against that of the best one so far.
			if !full[i] && (next < 0 || (shares[i]+1)*claims[next].Weight < (shares[next]+1)*c.Weight) {
				next = i
			}
		}
		if next < 0 {
			return shares
		}
		c := claims[next]
		used[c.Restriction]++
		if shares[next] == c.Demand || !r.holds(used) {
			used[c.Restriction]--
			full[next] = true // It stays so: the others only grow.
			continue
		}
		shares[next]++
	}
}

// holds reports whether the cluster has room for that much memory of each restriction.
func (r Room) holds(used [ByCPU + 1]int64) bool {
	left := r.Memory
	left[0], left[1] = left[0]-used[FirstPool], left[1]-used[SecondPool]
	if left[0] < 0 || left[1] < 0 {
		return false
	}
	var all, cpu int64
	for i := range Pools {
		all, cpu = all+left[i], cpu+min(left[i], r.CPU[i])
	}
	return used[ByCPU] <= cpu && used[ByCPU]+used[Anywhere] <= all
}

// Jain is Jain's index of the values: 1 if they are equal, 1/n if only one of n isn't 0.
func Jain(values []float64) float64 {
	var sum, squares float64
	for _, v := range values {
		sum, squares = sum+v, squares+v*v
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / (float64(len(values)) * squares)
}

// String implements fmt.Stringer.
func (r Restriction) String() string { return [...]string{"nothing", "pool 1", "pool 2", "CPU"}[r] }
