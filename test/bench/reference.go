package main

// restriction says which nodes a team's pods can use.
type restriction int

const (
	// anywhere: all nodes.
	anywhere restriction = iota
	// firstPool and secondPool: the nodes with that label.
	firstPool
	secondPool
	// byCPU: all nodes, whose CPUs suffice for a part of their memory only.
	byCPU
)

// pools are the parts of the cluster: the nodes of firstPool, those of secondPool, and the others.
const pools = 3

// room is the GPU memory of the cluster, by pool, and how much of it pods restricted by CPU can use.
type room struct{ memory, cpu [pools]int64 }

// claim is what a team is entitled to and asks for.
type claim struct {
	weight, demand int64
	restriction    restriction
}

// fairShares divides the room among the claims, unit by unit: the next unit goes to the claim with the least in proportion to its
// weight that can use one more. It shares no arithmetic with the programs under test.
func fairShares(r room, claims []claim) []int64 {
	shares, full := make([]int64, len(claims)), make([]bool, len(claims))
	var used [byCPU + 1]int64
	for {
		next := -1
		for i, c := range claims {
			// shares[i]/weight against that of the best one so far.
			if !full[i] && (next < 0 || (shares[i]+1)*claims[next].weight < (shares[next]+1)*c.weight) {
				next = i
			}
		}
		if next < 0 {
			return shares
		}
		c := claims[next]
		used[c.restriction]++
		if shares[next] == c.demand || !r.holds(used) {
			used[c.restriction]--
			full[next] = true // It stays so: the others only grow.
			continue
		}
		shares[next]++
	}
}

// holds reports whether the cluster has room for that much memory of each restriction.
func (r room) holds(used [byCPU + 1]int64) bool {
	left := r.memory
	left[0], left[1] = left[0]-used[firstPool], left[1]-used[secondPool]
	if left[0] < 0 || left[1] < 0 {
		return false
	}
	var all, cpu int64
	for i := range pools {
		all, cpu = all+left[i], cpu+min(left[i], r.cpu[i])
	}
	return used[byCPU] <= cpu && used[byCPU]+used[anywhere] <= all
}

// jain is Jain's index of the values: 1 if they are equal, 1/n if only one of n isn't 0.
func jain(values []float64) float64 {
	var sum, squares float64
	for _, v := range values {
		sum, squares = sum+v, squares+v*v
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / (float64(len(values)) * squares)
}
