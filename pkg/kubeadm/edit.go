package kubeadm

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// volume is the name of what Edit mounts.
const volume = "gpushare"

// manifest is a static pod of kube-scheduler.
type manifest struct {
	document  yaml.Node
	spec      *yaml.Node
	container *yaml.Node
	// flags is the list that they stand in: the container's command or its args.
	flags *yaml.Node
}

func parse(data []byte) (*manifest, error) {
	m := &manifest{}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(&m.document); err != nil {
		return nil, fmt.Errorf("reading the static pod: %w", err)
	}
	if err := decoder.Decode(new(yaml.Node)); err == nil {
		return nil, errors.New("reading the static pod: the file holds more than one object")
	}
	if len(m.document.Content) != 1 || text(at(m.document.Content[0], "kind")) != "Pod" {
		return nil, errors.New("the file is no Pod")
	}
	m.spec = at(m.document.Content[0], "spec")
	for _, container := range items(at(m.spec, "containers")) {
		command, args := at(container, "command"), at(container, "args")
		words := append(items(command), items(args)...)
		if len(words) == 0 || path.Base(text(words[0])) != "kube-scheduler" {
			continue
		}
		m.container, m.flags = container, command
		if len(items(args)) > 0 {
			m.flags = args
		}
		return m, nil
	}
	return nil, errors.New("no container of the static pod runs kube-scheduler as its command")
}

// flag returns the value of the last such flag, as --name=value or in two words.
func (m *manifest) flag(name string) (value string, found bool) {
	words := append(items(at(m.container, "command")), items(at(m.container, "args"))...)
	for i, word := range words {
		switch word := text(word); {
		case strings.HasPrefix(word, name+"="):
			value, found = strings.TrimPrefix(word, name+"="), true
		case word == name && i+1 < len(words):
			value, found = text(words[i+1]), true
		}
	}
	return value, found
}

// hostPath returns where a path inside the container lies on the host.
func (m *manifest) hostPath(inside string) (string, error) {
	best, volumeName := "", ""
	for _, mount := range items(at(m.container, "volumeMounts")) {
		where := strings.TrimSuffix(text(at(mount, "mountPath")), "/")
		if (inside == where || strings.HasPrefix(inside, where+"/")) && len(where) > len(best) && at(mount, "subPath") == nil {
			best, volumeName = where, text(at(mount, "name"))
		}
	}
	for _, v := range items(at(m.spec, "volumes")) {
		if host := text(at(at(v, "hostPath"), "path")); text(at(v, "name")) == volumeName && host != "" {
			return strings.TrimSuffix(host, "/") + strings.TrimPrefix(inside, best), nil
		}
	}
	return "", fmt.Errorf("%s, which kube-scheduler is given by --config, is on no hostPath volume", inside)
}

// Edit returns the static pod with --config=file, and the file's folder mounted where it lies on the host. What stands
// there otherwise stays. Editing twice is the same as once.
func Edit(data []byte, file string) ([]byte, error) {
	m, err := parse(data)
	if err != nil {
		return nil, err
	}
	if _, found := m.flag("--policy-config-file"); found {
		return nil, errors.New("kube-scheduler is given --policy-config-file, which excludes --config: add the extender to that file by hand (config/scheduler-policy-config.json)")
	}
	m.drop("--config")
	m.flags.Content = append(m.flags.Content, scalar("--config="+file))
	folder := path.Dir(file)
	put(list(m.container, "volumeMounts"), mapping("mountPath", folder, "name", volume, "readOnly", true))
	put(list(m.spec, "volumes"), mapping("hostPath", mapping("path", folder, "type", "Directory"), "name", volume))
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent() // As kubeadm writes it.
	if err := errors.Join(encoder.Encode(&m.document), encoder.Close()); err != nil {
		return nil, fmt.Errorf("writing the static pod: %w", err)
	}
	return out.Bytes(), nil
}

// drop takes a flag out of command and args.
func (m *manifest) drop(name string) {
	for _, words := range []*yaml.Node{at(m.container, "command"), at(m.container, "args")} {
		if words == nil {
			continue
		}
		for i := 0; i < len(words.Content); {
			switch word := text(words.Content[i]); {
			case strings.HasPrefix(word, name+"="):
				words.Content = slices.Delete(words.Content, i, i+1)
			case word == name:
				words.Content = slices.Delete(words.Content, i, min(i+2, len(words.Content)))
			default:
				i++
			}
		}
	}
}

// at returns the value of a key, nil where there is none.
func at(node *yaml.Node, key string) *yaml.Node {
	if node == nil || node.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == key {
			return node.Content[i+1]
		}
	}
	return nil
}

func items(node *yaml.Node) []*yaml.Node {
	if node == nil || node.Kind != yaml.SequenceNode {
		return nil
	}
	return slices.Clone(node.Content)
}

func text(node *yaml.Node) string {
	if node == nil {
		return ""
	}
	return node.Value
}

// list returns the list under a key, made where there is none.
func list(node *yaml.Node, key string) *yaml.Node {
	if found := at(node, key); found != nil && found.Kind == yaml.SequenceNode {
		return found
	}
	made := &yaml.Node{Kind: yaml.SequenceNode}
	if found := at(node, key); found != nil { // A key without a value.
		*found = *made
		return found
	}
	node.Content = append(node.Content, scalar(key), made)
	return made
}

// put adds an item, in place of the one of the same name.
func put(list, item *yaml.Node) {
	name := text(at(item, "name"))
	list.Content = append(slices.DeleteFunc(list.Content, func(n *yaml.Node) bool { return text(at(n, "name")) == name }), item)
}

func scalar(value any) *yaml.Node {
	var node yaml.Node
	if err := node.Encode(value); err != nil {
		panic(err) // Strings and booleans can be encoded.
	}
	return &node
}

func mapping(pairs ...any) *yaml.Node {
	node := &yaml.Node{Kind: yaml.MappingNode}
	for _, value := range pairs {
		child, ok := value.(*yaml.Node)
		if !ok {
			child = scalar(value)
		}
		node.Content = append(node.Content, child)
	}
	return node
}
