package main

import "math/rand"

// order returns the pods in the order of their arrival, and the order of the nodes, as the published experiments make both from a seed: the
// pods are shuffled, and some are left out or copied until they ask for that multiple of all cards. So ours and the published figures are of the
// same pods. The sequence of random numbers is that of package math/rand, and so of each version of Go.
func order(pods []tracePod, nodes []traceNode, multiple float64, seed int64) (arriving []tracePod, nodeOrder []int) {
	random := rand.New(rand.NewSource(seed))
	random.Int()
	arriving = append(arriving, pods...)
	random.Shuffle(len(arriving), func(i, j int) { arriving[i], arriving[j] = arriving[j], arriving[i] })
	asked, wanted := 0, multiple*float64(allCards(nodes)*cardMemory)
	for i := range arriving {
		asked += arriving[i].gpu()
	}
	if float64(asked) > wanted {
		arriving = leaveOut(arriving, asked, wanted, random)
	} else {
		arriving = addCopies(arriving, pods, asked, wanted, random)
	}
	return arriving, random.Perm(len(nodes))
}

func leaveOut(arriving []tracePod, asked int, wanted float64, random *rand.Rand) []tracePod {
	for float64(asked) > wanted {
		i := random.Intn(len(arriving))
		asked -= arriving[i].gpu()
		arriving = append(arriving[:i], arriving[i+1:]...)
	}
	return arriving
}

func addCopies(arriving, pods []tracePod, asked int, wanted float64, random *rand.Rand) []tracePod {
	for {
		pod := pods[random.Intn(len(pods))]
		if float64(asked+pod.milli) > wanted { // The published experiments check for one card only.
			return arriving
		}
		asked += pod.gpu()
		arriving = append(arriving, pod)
	}
}

func allCards(nodes []traceNode) (cards int) {
	for i := range nodes {
		cards += nodes[i].cards
	}
	return cards
}
