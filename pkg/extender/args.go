package extender

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

// nodesArgs are the arguments of filter and prioritize: a pod and the candidate nodes.
type nodesArgs struct{ extenderv1.ExtenderArgs }

// names returns the names of the candidate nodes. The request has only names if kube-scheduler's configuration has
// nodeCacheCapable: true, else whole Node objects.
func (a *nodesArgs) names() []string {
	if a.NodeNames != nil {
		return *a.NodeNames
	}
	if a.Nodes == nil {
		return nil
	}
	names := make([]string, len(a.Nodes.Items))
	for i := range a.Nodes.Items {
		names[i] = a.Nodes.Items[i].Name
	}
	return names
}

// decode gives the same result as encoding/json, and is faster for a body with thousands of node names.
func (a *nodesArgs) decode(body []byte) error {
	body, names, found := splitNames(body)
	if found && len(body) > maxPod {
		return errLargePod
	}
	if err := decodeJSON(body, &a.ExtenderArgs); err != nil {
		return err
	}
	if found {
		a.NodeNames = &names
	}
	return nil
}

// splitNames removes the node names from a body that ends with them, as kube-scheduler writes it, and leaves an empty list in
// their place. It returns any other body unchanged. Whether the rest is valid JSON is left to the decoder: the removed part
// is a complete list of strings, and only the body's last brace follows.
func splitNames(body []byte) (rest []byte, names []string, found bool) {
	const key = `"NodeNames":[`
	at := bytes.Index(body, []byte(key))
	if at < 1 || body[at-1] != ',' && body[at-1] != '{' { // The quote can be an escaped one inside a longer key.
		return body, nil, false
	}
	at += len(key)
	list, ok := strings.CutSuffix(string(bytes.TrimRight(body[at:], " \t\r\n")), "]}")
	if !ok {
		return body, nil, false
	}
	names = make([]string, 0, strings.Count(list, `"`)/2)
	for more := list != ""; more; {
		if list == "" || list[0] != '"' {
			return body, nil, false
		}
		end := strings.IndexByte(list[1:], '"')
		if end < 0 || !isPlain(list[1:1+end]) {
			return body, nil, false
		}
		names = append(names, list[1:1+end])
		list = list[end+2:]
		more = list != ""
		if more {
			if list[0] != ',' {
				return body, nil, false
			}
			list = list[1:]
		}
	}
	return append(body[:at], "]}"...), names, true
}

// decode decodes the body into the arguments. It must be exactly one JSON value.
func decode(body []byte, into any) error {
	if own, ok := into.(interface{ decode(body []byte) error }); ok {
		return own.decode(body)
	}
	return decodeJSON(body, into)
}

func decodeJSON(body []byte, into any) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return errors.New("the request's body is empty")
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("the request's body can't be read: %w", err)
	}
	return nil
}
