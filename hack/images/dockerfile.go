package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
)

// stage is the last stage of a Dockerfile: the properties of the image except its files.
type stage struct {
	user       string
	entrypoint []string
	labels     map[string]string
}

// lastStage matches the last stage of our Dockerfiles. Its files are those of rootfs.sh: the archives have no others.
var lastStage = regexp.MustCompile(`\nFROM scratch\nARG .*\nLABEL ((?:.* \\\n)*.*)\nCOPY --from=build /rootfs /\nUSER (.*)\nENTRYPOINT (.*)\n$`)

// parse parses the last stage of a Dockerfile. args are the values of its ARGs.
func parse(dockerfile string, args map[string]string) (stage, error) {
	found := lastStage.FindStringSubmatch(dockerfile)
	if found == nil {
		return stage{}, fmt.Errorf("its last stage isn't of the form %s", lastStage)
	}
	out := stage{user: found[2], labels: map[string]string{}}
	for word := range strings.FieldsSeq(strings.ReplaceAll(found[1], "\\\n", " ")) {
		name, value, _ := strings.Cut(word, "=")
		out.labels[name] = os.Expand(value, func(name string) string { return args[name] })
	}
	if err := json.Unmarshal([]byte(found[3]), &out.entrypoint); err != nil {
		return stage{}, fmt.Errorf("ENTRYPOINT %s: %w", found[3], err)
	}
	return out, nil
}
