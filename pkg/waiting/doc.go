// Package waiting says why a pod waits for GPU memory: a cause in one word, and an explanation from the nodes as they
// are now. The web page, the metrics and kubectl inspect all ask it, so they never tell different stories. It decides
// from values alone and writes nothing; kube-scheduler may know of more that is in the way, such as a lack of processors,
// and says so in the pod's condition, see Reason.
package waiting
