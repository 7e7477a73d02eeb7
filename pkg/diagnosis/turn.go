package diagnosis

// Turn is what a pod waits for that must not be scheduled before its turn.
type Turn struct {
	// Text is the sentence that is shown to users.
	Text string
	// Incomplete is true if the pod's group isn't complete, so that it has no turn.
	Incomplete bool
}
