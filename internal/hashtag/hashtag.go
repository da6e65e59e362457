// Package hashtag knows which part of a key a Redis Cluster hashes.
package hashtag

import "strings"

// Of answers what of a key is hashed: between the first brace and the next one that closes, if anything stands there.
// Otherwise it is the whole key.
func Of(key string) (string, bool) {
	_, after, ok := strings.Cut(key, "{")
	if !ok {
		return "", false
	}
	tag, _, ok := strings.Cut(after, "}")
	return tag, ok && tag != ""
}
